"""Images that a request names by their address: which addresses may be used, and how images are fetched from there."""
