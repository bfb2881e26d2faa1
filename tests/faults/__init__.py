"""Faults and hostile input against real processes. `just faults` runs them, on a machine that does nothing else meanwhile.

What is marked `system` asserts no times, memory or throughput; `just test-system` runs it. Only here do tests assert times.
What was measured is printed at the end, beside its limit.
"""
