"""Interfaces of other detection services, each a module: their paths, requests, answers and errors."""
