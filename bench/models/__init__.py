"""Models for measurements only: a Triton config each, and one implementation that they share."""
