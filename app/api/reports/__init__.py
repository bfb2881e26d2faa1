"""Reports of the gateway's state: health, readiness, metrics, models."""
