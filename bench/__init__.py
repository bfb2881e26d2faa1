"""Measurements: ./just bench NAME."""
