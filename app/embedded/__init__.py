"""The embedded Triton, and the processes of `serve`. Independent of requests."""
