"""POST /ingest, /search/... and the like: routes about images that were sent before. They exist if search is on."""
