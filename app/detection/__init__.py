"""Conversion of a model's output tensors to boxes, in numpy. Independent of Triton, HTTP and image formats."""
