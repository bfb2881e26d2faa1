"""The dialect of Roboflow: its inference server (v1) and its hosted API (v0), both used by `inference-sdk`.

Source: roboflow/inference, inference/core/interfaces/http/http_api.py, inference/core/entities/, inference_sdk/http/client.py.
"""

from app.api.dialects.roboflow.routes import DIALECT

__all__ = ["DIALECT"]
