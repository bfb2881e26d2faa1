"""What the gateway knows of a model, derived from its Triton config. Never knows how the config was fetched."""
