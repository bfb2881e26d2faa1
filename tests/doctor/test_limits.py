"""What is said of the limits of this machine: real ones, in processes of their own, as far as they can be had."""

import os
import resource
import sys
from collections.abc import Callable
from typing import Any

import pytest

from app.doctor import limits
from app.doctor.finding import Finding, Severity
from app.host import cores, memory
from app.host.processes import MAX_CONNECTIONS, RESERVED_FILES
from app.settings.schema import Settings
from app.triton import shared_memory
from app.triton.shared_memory import MAX_ARENA_BYTES
from tests.doctor.setups import FAILURE, OK, WARNING, assert_finding, run_command

MIB = 2**20
UINT8_640 = 640 * 640 * 3
SMALL_SHM = "unshare --mount sh -c 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec \"$@\"' sh"
SMALL_IMAGES = {"workers": 1, "max_megapixels": 12, "max_file_size_mb": 10, "max_batch_size_mb": 20}

Check = Callable[..., dict[str, Finding]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Check settings on a machine with four cores, 1 GiB of shared memory and 8 GiB of memory, or others."""

    def check(
        settings: dict[str, Any], machine: dict[str, Any], slot_bytes: int | None = UINT8_640, *, maps_memory: bool = True
    ) -> dict[str, Finding]:
        has = {"cores": 4.0, "room": 2**30, "memory": 2**33, "files": 10**6, **machine}
        monkeypatch.setattr(cores, "available", lambda: has["cores"])
        monkeypatch.setattr(shared_memory, "room", lambda: has["room"])
        monkeypatch.setattr(memory, "available_bytes", lambda: has["memory"])
        monkeypatch.setattr(resource, "getrlimit", lambda _: (min(has["files"], 1024), has["files"]))
        return {finding.code: finding for finding in limits.check(Settings(**settings), slot_bytes, maps_memory=maps_memory)}

    return check


@pytest.mark.system
@pytest.mark.parametrize(
    ("command", "workers", "code", "says"),
    [
        (f"taskset -c {min(os.sched_getaffinity(0))}", 8, "workers", ["8 workers for 1 core", "NEREID_WORKERS=1"]),
        # The hard limit counts, because the soft one is raised.
        ("ulimit -Sn 200; ulimit -Hn 300;", 1, "open_files", ["300 files", "soft 200", "236 connections", "nofile=16448"]),
        # Containers have 64 MiB by default.
        (SMALL_SHM, 2, "dev_shm", ["each of 2 workers needs 38 MiB", "room for 64 MiB", "1 of them", "--shm-size=94m"]),
    ],
)
def test_real_limits(command: str, workers: int, code: str, says: list[str]) -> None:
    if command == SMALL_SHM and os.geteuid() != 0:
        pytest.skip("only root can mount a small /dev/shm for the test")
    shell = ("sh", "-c", f'{command} "$0" -m app doctor --json', sys.executable)
    _, found = run_command(*shell, NEREID_WORKERS=str(workers))

    assert_finding(found[code], WARNING, *says)


@pytest.mark.parametrize(
    ("machine", "settings", "code", "severity", "says"),
    [
        ({"cores": 2.0}, {"workers": 3}, "workers", WARNING, ["3 workers for 2 cores", "NEREID_WORKERS=2"]),
        ({"cores": 0.5}, {"workers": 2}, "workers", WARNING, ["2 workers for 0.5 cores", "NEREID_WORKERS=1"]),
        ({}, {"workers": 4, "instances": 2}, "workers", WARNING, ["8 workers for 4 cores", "NEREID_WORKERS=2"]),
        ({"cores": 8.0}, {"workers": 2}, "workers", WARNING, ["only 2 of them", "NEREID_WORKERS=8"]),
        ({"cores": 8.0}, {"workers": 1, "instances": 2}, "workers", WARNING, ["only 2 of them", "NEREID_WORKERS=4"]),
        ({"cores": 1.5}, {"workers": 2}, "workers", OK, []),
        ({}, {"workers": 2}, "workers", OK, []),
        ({"cores": 1.5}, {}, "workers", OK, []),  # one for each core of the host would be too many
        ({"cores": 1.0}, {"workers": 1, "instances": 2}, "workers", OK, []),  # each instance needs one
        ({}, {"workers": 4, "decode_threads": 1}, "decode_threads", OK, []),
        ({}, {"workers": 4, "decode_threads": 4}, "decode_threads", OK, []),
        ({}, {"workers": 4, "decode_threads": 5}, "decode_threads", WARNING, ["only take memory", "DECODE_THREADS=2"]),
        ({}, {"workers": 2, "decode_threads": 1}, "decode_threads", WARNING, ["not all cores", "DECODE_THREADS=2"]),
        # A worker needs some files for itself.
        ({"files": RESERVED_FILES}, {}, "open_files", FAILURE, [f"needs {RESERVED_FILES} for itself"]),
        ({"files": MAX_CONNECTIONS + RESERVED_FILES - 1}, {}, "open_files", WARNING, ["further clients wait"]),
        ({"files": MAX_CONNECTIONS + RESERVED_FILES}, {}, "open_files", OK, []),
        ({"room": 50 * MIB}, {"workers": 2}, "dev_shm", WARNING, ["1 of them copy", "--shm-size=94m"]),
        ({"room": None}, {"workers": 2}, "dev_shm", WARNING, ["2 of them copy", "does not exist"]),
        ({"room": 0}, {"workers": 2, "transport": "shm"}, "dev_shm", FAILURE, ["2 of them can send nothing"]),
        ({"room": 75 * MIB}, {"workers": 2}, "dev_shm", OK, []),
        ({"memory": 512 * MIB}, {"workers": 1}, "memory", WARNING, ["of 512 MiB", "kernel may kill", "NEREID_MAX_MEGAPIXELS=12"]),
        ({"memory": 1024 * MIB}, SMALL_IMAGES, "memory", OK, []),
        # The largest image is admitted whatever the budget: a JPEG, or an AVIF of 128 MiB.
        ({}, {"workers": 1, "memory_mb": 100}, "memory", WARNING, ["NEREID_MEMORY_MB=100", "NEREID_MEMORY_MB=894"]),
        ({}, {"workers": 1, "memory_mb": 100, "max_megapixels": 1}, "memory", WARNING, ["NEREID_MEMORY_MB=528"]),
        ({}, {"workers": 2, "memory_mb": 1000}, "memory", OK, ["1000 MiB each, all in all 2355 of 8192 MiB"]),
    ],
)
def test_machine_and_settings(  # noqa: PLR0913, PLR0917 - a table
    check: Check, machine: dict[str, Any], settings: dict[str, Any], code: str, severity: Severity, says: list[str]
) -> None:
    assert_finding(check(settings, machine)[code], severity, *says)


def test_size_of_the_models_input_decides_about_shared_memory(check: Check) -> None:
    """Without a model, 640 x 640 is assumed. Where none is used, its size does not matter."""
    settings, machine = {"workers": 2}, {"room": 100 * MIB}

    assert check(settings, machine, None)["dev_shm"].severity is OK
    assert check(settings, machine, 4 * UINT8_640)["dev_shm"].severity is WARNING
    assert_finding(check(settings, machine, MAX_ARENA_BYTES + 1)["dev_shm"], WARNING, "too large", "smaller")
    assert "dev_shm" not in check(settings, {"room": 0}, maps_memory=False)
    assert "dev_shm" not in check({"transport": "inline"}, {"room": 0})
