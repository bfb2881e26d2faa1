"""Starts and stops servers, measures their processes and Triton, and runs contests. Does not print results."""
