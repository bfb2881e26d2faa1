"""What a Triton may refuse an inference with."""

import grpc

Refusal = tuple[grpc.StatusCode, str]

STOPPING = grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new inference requests"
REFUSED = grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused"
BROKEN = grpc.StatusCode.UNAVAILABLE, "Socket closed"
SICK = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
CANCELLED = grpc.StatusCode.CANCELLED, ""
DENIED = grpc.StatusCode.PERMISSION_DENIED, "Received http2 header with status: 403"
RESTRICTED = grpc.StatusCode.UNAVAILABLE, "This protocol is restricted"
FULL = grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"
LATE = grpc.StatusCode.UNAVAILABLE, "Request timeout expired"
UNANSWERED = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
MISSHAPEN = grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"
FAILED = grpc.StatusCode.INTERNAL, "the model has failed"
NOT_LOADED = grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"
GONE = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
