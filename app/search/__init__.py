"""Search in images that were sent before. It asks models by cascades; only `postgres` knows SQL, and nothing here knows HTTP."""
