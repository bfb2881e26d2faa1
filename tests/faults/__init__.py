"""Faults and hostile input against real processes, which take minutes; what is marked `system` runs with `just test-system`."""
