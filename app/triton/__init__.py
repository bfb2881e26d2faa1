"""Triton over gRPC and shared memory. Knows messages, status codes and regions; never knows images or HTTP."""

import os

# gRPC's handlers of a fork crash the child while another thread makes a call, before the child has run its program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
