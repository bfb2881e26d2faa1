"""POST /detect/batch: several images in one request. Each image succeeds or fails on its own."""
