"""The machine Nereid runs on: processes, ports, installed packages, the C library. Never knows Triton, models or requests."""
