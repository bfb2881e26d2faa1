"""Encoded images to upright RGB pixels on a canvas. Never knows a model, and never waits."""
