"""Stand-in for torchvision, whose builds must match PyTorch's exactly; Ultralytics needs only its version and `ops.nms`."""

from torchvision import ops as ops
