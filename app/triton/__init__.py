"""Triton over gRPC and shared memory. Knows messages, status codes and regions; never knows images or HTTP."""
