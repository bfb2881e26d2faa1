"""Admission, deadlines, circuit breakers, retries and shared work. Never knows what the work is."""
