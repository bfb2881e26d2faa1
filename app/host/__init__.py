"""The machine Nereid runs on: processes, signals, ports, packages, the C library. Never knows Triton, models or requests."""
