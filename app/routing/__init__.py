"""Names that stand for models: canaries, shadows and fallbacks. Knows neither HTTP nor gRPC."""
