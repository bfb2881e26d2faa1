"""Images that a request names by URL: allowed URLs, and fetching."""
