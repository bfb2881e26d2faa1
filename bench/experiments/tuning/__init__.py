"""Tuning a model: the dimensions, the measurement, the search and the choice of a variant."""
