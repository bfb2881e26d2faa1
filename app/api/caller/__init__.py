"""Who sends a request: the API keys and the check of a request's key, and the address of a client behind a proxy."""
