"""Tensors of Frigate's ZMQ detector. Knows neither HTTP nor gRPC."""
