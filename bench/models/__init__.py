"""Models for measurements: a Triton config for each, and one shared implementation."""
