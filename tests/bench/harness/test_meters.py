"""CPU time and memory of processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from bench.harness.counters import Counters
from bench.harness.meters import (
    MIB,
    Meters,
    busiest,
    children,
    cpu_seconds,
    family,
    listeners,
    worker_memory,
)
from bench.report.measurements import TritonUse
from tests.bench.support import make_outcome
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture

CHILD = "import signal; held = bytearray(50 << 20); print(flush=True); signal.pause()"


@pytest.fixture
def parent() -> psutil.Process:
    return psutil.Process()


def test_a_family_is_a_process_and_everything_it_has_started(parent: psutil.Process) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = psutil.Process(child.pid)

        assert child.pid in [member.pid for member in children(parent)]
        assert family(parent)[0].pid == os.getpid()
        (memory,) = worker_memory(process, 1)
        assert memory.resident >= memory.unshared > 50 * MIB
        assert busiest(process) == child.pid
        assert busiest(parent) != parent.pid
        child.kill()

    assert family(process) == []
    assert cpu_seconds(process) == 0


@pytest.mark.parametrize("kind", ["http://{}/detect", "{}", "unix:"])
def test_the_listener_at_an_address_is_found(parent: psutil.Process, tmp_path: Path, kind: str) -> None:
    with socket.socket(socket.AF_UNIX if kind == "unix:" else socket.AF_INET) as server:
        server.bind(str(tmp_path / "s") if kind == "unix:" else ("127.0.0.1", 0))
        server.listen()
        name = server.getsockname()
        address = f"unix:{name}" if kind == "unix:" else kind.format(f"127.0.0.1:{name[1]}")
        assert parent.pid in [process.pid for process in listeners(address)]

    assert listeners(address) == []


def test_cpu_time_is_that_since_the_start_per_request(parent: psutil.Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that appeared in the meantime counts in full; kinds without processes are left out."""
    used = {parent.pid: 10.0, 1: 5.0}
    found = {"gateway": [parent], "triton": []}
    monkeypatch.setattr("bench.harness.meters.cpu_seconds", lambda process: used[process.pid])
    meters = Meters(lambda: found, [], "")
    used[parent.pid] = 12.0
    found["gateway"] = [parent, psutil.Process(1)]
    measured = meters.read(make_outcome([1.0] * 100))

    assert measured.cpu_ms == pytest.approx({"gateway": 70.0, "client": 5.0})
    assert measured.triton is None
    assert not measured.triton_note


def test_counters_of_several_tritons_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    images = {"http://one": 5, "http://other": 0}

    def read_counters(triton: str, _model: str) -> Counters:
        count = images[triton]
        return Counters(
            inferences=count, executions=count, successes=count, compute_ns=0, waits=0, queue_ns=0, batches={"1": count}
        )

    monkeypatch.setattr("bench.harness.meters.read_counters", read_counters)
    meters = Meters(dict, list(images), "m")
    images["http://one"] += 2
    images["http://other"] += 3
    measured = meters.read(make_outcome([1.0]))

    assert measured.triton == TritonUse(inferences=5, executions=5, queue_ms=0.0, compute_ms=0.0, batches={"1": 5})


def test_counters_that_cannot_be_read_are_explained() -> None:
    measured = Meters(dict, ["127.0.0.1:1"], "m").read(make_outcome([1.0]))

    assert measured.triton is None
    assert "127.0.0.1:1" in measured.triton_note
    assert measured.figures["requests/s"] == 0.5
