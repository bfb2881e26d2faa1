"""Several images in one request, as for POST /detect/batch: how each is asked about, and what becomes of it."""
