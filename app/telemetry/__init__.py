"""Logs, metrics, request timing and traces. Independent of what is logged, counted or timed."""
