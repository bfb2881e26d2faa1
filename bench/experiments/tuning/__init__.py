"""Tuning a model: what can be varied, how a variant is measured, which ones are tried, and which one is chosen."""
