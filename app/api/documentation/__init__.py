"""What the gateway says of how it is used: the OpenAPI document, its page, and the page at `/`."""
