"""Checks the machine, the settings, a running Triton and its default model with the functions of requests, and suggests fixes."""
