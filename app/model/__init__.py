"""Model specs, derived from Triton configs. Does not depend on how a config is fetched."""
