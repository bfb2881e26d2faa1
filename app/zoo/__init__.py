"""Models that `pull` can download and compose. Independent of requests and of a running Triton."""
