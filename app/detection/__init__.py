"""A model's output tensors to boxes, in plain numpy. Never knows Triton, HTTP or how the image was encoded."""
