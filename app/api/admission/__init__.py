"""Checks of a request before its body is received: framing, key, type, length, circuit, capacity."""
