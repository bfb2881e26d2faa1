"""What a Triton may refuse an inference with."""

import grpc

Refusal = tuple[grpc.StatusCode, str]

STOPPING = grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new inference requests"
BROKEN = grpc.StatusCode.UNAVAILABLE, "Socket closed"
SICK = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
RESTRICTED = grpc.StatusCode.UNAVAILABLE, "This protocol is restricted"
FULL = grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"
LATE = grpc.StatusCode.UNAVAILABLE, "Request timeout expired"
MISSHAPEN = grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"
FAILED = grpc.StatusCode.INTERNAL, "the model has failed"
GONE = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
