"""Logs, metrics and request timing. Never knows what is logged, counted or timed."""
