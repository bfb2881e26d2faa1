"""Servers under measurement: starts and stops them, meters their processes and Triton, holds contests. Never prints results."""
