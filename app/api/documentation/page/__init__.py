"""The page at `/` to try the gateway in a browser. Programs get a description of the service instead."""
