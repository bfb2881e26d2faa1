"""Oriented boxes, in numpy. Independent of Triton and HTTP."""
