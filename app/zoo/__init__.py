"""Models that `pull` downloads, and that `add` makes of a user's own networks. Independent of requests and of a running Triton."""
