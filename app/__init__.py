"""Nereid: an HTTP gateway for object detection on NVIDIA Triton.

Each package covers one subject. CONTRIBUTING.md lists the packages and follows a request through them.
"""

__version__ = "0.1.0"
