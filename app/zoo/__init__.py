"""Models that `pull` can fetch and compose. Never knows a request or a running Triton."""
