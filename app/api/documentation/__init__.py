"""Documentation for callers: the OpenAPI document, its page, and the page at `/`."""
