"""Host functions: processes, signals, ports, packages, the C library. Independent of Triton, models and requests."""
