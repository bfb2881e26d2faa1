"""Logs and request timing. Never knows what is logged or timed."""
