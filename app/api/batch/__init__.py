"""POST /detect/batch: several images in one request, each of which succeeds or fails alone."""
