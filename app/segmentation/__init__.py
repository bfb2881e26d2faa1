"""Masks of segmented objects, in numpy and OpenCV. Independent of Triton and HTTP."""
