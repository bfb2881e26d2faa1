"""Interfaces of other detection services, one module each: their paths, requests, responses and errors."""
