"""Logs, request timing and traces. Never knows what is logged or timed."""
