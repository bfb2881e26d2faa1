"""Nereid: an HTTP gateway for object detection on NVIDIA Triton.

This package is the program `nereid`, not a library: its modules change without notice. Each of its packages covers one subject.
CONTRIBUTING.md lists them and follows a request through them.
"""

__version__ = "0.1.0"
