"""Memory that a request frees is kept for the next one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from app.host import allocator
from tests.support import ROOT

# Prints how many pages the kernel has to zero and map again for blocks of a size that was freed a moment ago.
SCRIPT = """
import resource, sys
from app.host import allocator
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
    """Count the page faults in a new process."""
    command = [sys.executable, "-c", SCRIPT, how]
    return int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


def test_freed_memory_is_used_again() -> None:
    """A block of 4 MiB is not mapped again for each allocation, as it is with the defaults of glibc."""
    assert faults("kept") < faults("as it is") / 10


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other C libraries have no `mallopt`."""
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())

    allocator.keep_freed_memory()
    allocator.return_freed_memory()


# Prints the resident memory in MiB after a burst of small objects, before and after it is returned.
BURST = """
from pathlib import Path
from app.host import allocator

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 >> 20

allocator.keep_freed_memory()
burst = [bytes(100_000) for _ in range(2000)]
last = bytes(100_000)
del burst
before = resident()
allocator.return_freed_memory()
print(before - resident())
"""


def test_memory_of_a_burst_can_be_returned() -> None:
    output = subprocess.run([sys.executable, "-c", BURST], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert int(output) > 100
