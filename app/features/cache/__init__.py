"""Results of models for images that were sent before, and identical questions under way. Knows neither HTTP nor gRPC."""
