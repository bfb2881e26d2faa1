"""The `model.py` of the backend `onnxruntime` in Triton; imports the modules that `launch` installs next to it."""

import sys
from pathlib import Path

# Before Triton's working directory, which may contain modules with the same names.
sys.path.insert(0, str(Path(__file__).parent))

from app.embedded.onnx_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
