"""The dialect of Label Studio's ML backends: predicts rectangles for the tasks of a project.

Source: the client in label_studio/ml/api_connector.py and models.py of Label Studio; the server in label_studio_ml/api.py and
response.py of label-studio-ml-backend.
"""

from app.api.dialects.label_studio.routes import DIALECT

__all__ = ["DIALECT"]
