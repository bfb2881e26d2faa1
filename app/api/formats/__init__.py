"""From one result to many formats. Each has a file here and a line in `choice`; none knows how the request came in."""
