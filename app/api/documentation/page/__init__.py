"""The page at `/`, on which people try the gateway in a browser; to programs, `/` describes the service."""
