"""The dialect of Roboflow: of its inference server (v1) and of its hosted API (v0), as `inference-sdk` speaks both.

Source: roboflow/inference, inference/core/interfaces/http/http_api.py, inference/core/entities/, inference_sdk/http/client.py.
"""

from app.api.dialects.roboflow.routes import DIALECT

__all__ = ["DIALECT"]
