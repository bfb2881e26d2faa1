"""A model's output tensor to ranked classes, in plain numpy. Never knows Triton, HTTP or how the image was encoded."""
