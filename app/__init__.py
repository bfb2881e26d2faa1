"""Nereid: an HTTP gateway for object detection on NVIDIA Triton.

Each package is one subject; CONTRIBUTING.md lists them and follows a request through them.
"""

__version__ = "0.1.0"
