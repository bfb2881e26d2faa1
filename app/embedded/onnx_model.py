"""What Triton loads as the model of the backend `onnxruntime`: the modules that `launch` has put beside this file."""

import sys
from pathlib import Path

# In front of the folder that Triton was started in, which may have modules of the same names.
sys.path.insert(0, str(Path(__file__).parent))

from app.embedded.onnx_backend import TritonPythonModel

__all__ = ["TritonPythonModel"]
