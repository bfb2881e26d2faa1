"""Faults and hostile input against real processes. `just faults` runs them, on a machine that does nothing else meanwhile.

What is marked `system` asserts no times, memory or throughput; `just test-system` runs it.

Only here do tests assert times. The docstring of each test names its row in the list of faults; to list them:
`grep -rnE "Rows? [0-9]" tests/faults`. The rows that are missing are in `docs/how-to/failures.md`, or tested where input is parsed.
What was measured is printed at the end, beside its limit.
"""
