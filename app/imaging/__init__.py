"""Decode images onto a canvas, and draw boxes on them. Knows only how a model fits its images; never waits."""
