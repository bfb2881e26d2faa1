"""Measurements: ./just bench NAME. Each prints what the README claims."""
