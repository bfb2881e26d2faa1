"""Extraction of the encoded image and the parameters from a request body of any supported type."""
