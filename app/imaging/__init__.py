"""Encoded images to upright RGB pixels on a canvas. Knows of a model only how it wants its images; never waits."""
