"""The dialect of Label Studio's ML backends: a project's tasks get rectangles.

Source: label_studio/ml/api_connector.py and models.py of Label Studio, which ask; label_studio_ml/api.py and response.py of
label-studio-ml-backend, which answer.
"""

from app.api.dialects.label_studio.routes import DIALECT

__all__ = ["DIALECT"]
