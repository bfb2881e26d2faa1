"""What pictures free is kept."""

import subprocess
import sys

from tests.conftest import ROOT

# Pages that the kernel has to zero and map again for a block that was freed a moment ago.
SCRIPT = """
import resource, sys
from app import allocator
if sys.argv[1] == "kept":
    allocator.keep_freed_memory()
for _ in range(3):
    for _ in range(20):
        block = bytes(4 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        block = None
        block = bytes(4 << 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    """Count them in a process of their own."""
    command = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_freed_memory_is_used_again() -> None:
    """A block of 4 MB is not faulted in anew each time, which it is by the defaults of glibc."""
    assert faults("kept") < faults("as it is") / 10
