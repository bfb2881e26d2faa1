"""Checks the machine, the settings, a running Triton and its default model, and suggests fixes.

It calls the same functions as requests, and does not depend on how requests are handled.
"""
