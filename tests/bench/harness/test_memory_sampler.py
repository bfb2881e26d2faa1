"""Reading memory in the background."""

import subprocess
import sys

import psutil

from bench.harness.memory_sampler import MemorySampler
from bench.harness.meters import find_workers
from tests.processes import wait_for

WAIT = "import sys; sys.stdin.read()"
LARGE = f"content = bytearray(b'x') * 2**26; print(flush=True); {WAIT}"


def test_memory_is_read_until_the_block_ends() -> None:
    own = psutil.Process()
    with MemorySampler([own, own]) as sampler:
        wait_for(lambda: all(len(one.seconds) > 1 for one in sampler.series))

    first, second = sampler.series
    assert len(first.seconds) == len(first.resident_mib) == len(first.proportional_mib) == len(second.seconds) > 1
    assert first.seconds == sorted(first.seconds)
    assert 0 < first.proportional_mib[0] <= first.resident_mib[0]


def test_a_process_that_ends_has_a_shorter_series() -> None:
    child = subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE)
    with MemorySampler([psutil.Process(child.pid), psutil.Process()]) as sampler:
        ended, alive = sampler.series
        child.communicate()
        until = len(ended.seconds) + 2  # the child may have been read once more
        wait_for(lambda: len(alive.seconds) > until)

    assert len(ended.seconds) < len(alive.seconds)


def test_workers_are_the_largest_processes_of_a_server() -> None:
    """A process that its own child outgrows is not one of them; a server that has ended has none."""
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LARGE!r}])"
    server = subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process = psutil.Process(server.pid)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        (worker,) = process.children()

        assert find_workers(process, 1) == [worker]
        assert find_workers(process, 9) == [worker, process]
    finally:
        server.communicate()
    assert find_workers(process, 1) == []
