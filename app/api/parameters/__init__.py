"""The parameters of each kind of request, and their parsing."""
