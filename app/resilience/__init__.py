"""Admission, deadlines and shared work. Never knows what the work is."""
