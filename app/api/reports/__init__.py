"""What the gateway reports of itself: health, readiness, metrics, models."""
