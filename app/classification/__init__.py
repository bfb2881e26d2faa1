"""Conversion of a model's output tensor to ranked classes, in numpy. Independent of Triton, HTTP and image formats."""
