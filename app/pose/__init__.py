"""Keypoints of poses, in numpy. Independent of Triton and HTTP."""
