"""Logs, metrics, request timing and traces. Never knows what is logged, counted or timed."""
