"""What is said of the limits of this machine: real ones, in processes of their own, as far as they can be had."""

import os
import resource
import sys
from typing import Any, Literal

import pytest

from app.doctor import limits
from app.doctor.finding import Finding, Severity
from app.host import cores, memory
from app.host.processes import MAX_CONNECTIONS, RESERVED_FILES
from app.settings.schema import Settings
from app.triton import shared_memory
from app.triton.shared_memory import MAX_ARENA_BYTES
from tests.doctor.setups import assert_useful, run_command

MIB = 2**20
UINT8_640 = 640 * 640 * 3
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm for the test")


def check(settings: Settings, slot_bytes: int | None = UINT8_640, *, maps_memory: bool = True) -> dict[str, Finding]:
    return {finding.code: finding for finding in limits.check(settings, slot_bytes, maps_memory=maps_memory)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The properties of this machine, for the test to change."""
    has: dict[str, Any] = {"cores": 4.0, "room": 2**30, "memory": 2**33}
    monkeypatch.setattr(cores, "available", lambda: has["cores"])
    monkeypatch.setattr(shared_memory, "room", lambda: has["room"])
    monkeypatch.setattr(memory, "available_bytes", lambda: has["memory"])
    return has


def run_in_shell(command: str, **settings: str) -> dict[str, Finding]:
    """Run the command line from a shell that has changed its limits."""
    return run_command("sh", "-c", f'{command} "$0" -m app doctor --json', sys.executable, **settings)[1]


@pytest.mark.system
def test_many_workers_on_one_core() -> None:
    core = min(os.sched_getaffinity(0))
    found = run_in_shell(f"taskset -c {core}", NEREID_WORKERS="8")

    assert_useful(found["workers"], Severity.WARNING, says=["8 workers for 1 core"], fix="NEREID_WORKERS=1")
    assert "decode_threads" not in found


@pytest.mark.system
def test_few_open_files() -> None:
    """The hard limit counts, because the soft one is raised."""
    found = run_in_shell("ulimit -Sn 200; ulimit -Hn 300;")

    assert_useful(
        found["open_files"], Severity.WARNING, says=["300 files", "soft 200", "236 connections"], fix="--ulimit nofile=16448"
    )


@pytest.mark.system
@AS_ROOT
def test_a_small_dev_shm() -> None:
    """Containers have 64 MiB by default."""
    mounted = "unshare --mount sh -c 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec \"$@\"' sh"
    found = run_in_shell(mounted, NEREID_WORKERS="2")

    assert_useful(
        found["dev_shm"],
        Severity.WARNING,
        says=["each of 2 workers needs 38 MiB", "room for 64 MiB", "1 of them"],
        fix="--shm-size=94m",
    )


def test_a_machine_that_is_large_enough(machine: dict[str, Any]) -> None:
    found = check(Settings(workers=int(machine["cores"])))

    assert set(found) >= {"workers", "decode_threads", "dev_shm", "memory"}
    assert {found[code].severity for code in ("workers", "decode_threads", "dev_shm", "memory")} == {Severity.OK}


@pytest.mark.parametrize(
    ("cores", "settings", "says", "fix"),
    [
        (2.0, {"workers": 3}, "3 workers for 2 cores", "NEREID_WORKERS=2"),
        (1.5, {"workers": 3}, "3 workers for 1.5 cores", "NEREID_WORKERS=1"),
        (1.0, {"workers": 2}, "2 workers for 1 core:", "NEREID_WORKERS=1"),
        (0.5, {"workers": 2}, "2 workers for 0.5 cores", "NEREID_WORKERS=1"),
        (4.0, {"workers": 4, "instances": 2}, "8 workers for 4 cores", "NEREID_WORKERS=2"),
        (8.0, {"workers": 2}, "only 2 of them", "NEREID_WORKERS=8"),
        (8.0, {"workers": 1, "instances": 2}, "only 2 of them", "NEREID_WORKERS=4"),
    ],
)
def test_workers_that_do_not_fit_the_cores(
    machine: dict[str, Any], cores: float, settings: dict[str, int], says: str, fix: str
) -> None:
    machine["cores"] = cores

    assert_useful(check(Settings(**settings))["workers"], Severity.WARNING, says=[says], fix=fix)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cores", "settings"),
    [
        *((cores, {"workers": workers}) for cores, workers in ((2.0, 2), (2.0, 1), (1.5, 2), (4.0, 2), (0.5, 1))),
        (1.5, {}),  # one for each core of the host would be too many
        (1.0, {"workers": 1, "instances": 2}),  # each instance needs one
    ],
)
def test_workers_that_fit_the_cores(machine: dict[str, Any], cores: float, settings: dict[str, int]) -> None:
    machine["cores"] = cores
    assert check(Settings(**settings))["workers"].severity is Severity.OK  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "threads", "says"),
    [(4, 1, None), (4, 2, None), (4, 4, None), (4, 9, "they only take memory"), (2, 1, "not all cores")],
    ids=["one", "default", "twice", "many", "too few"],
)
@pytest.mark.usefixtures("machine")
def test_decoding_threads(workers: int, threads: int, says: str | None) -> None:
    finding = check(Settings(workers=workers, decode_threads=threads))["decode_threads"]

    if says is None:
        assert finding.severity is Severity.OK
    else:
        assert_useful(finding, Severity.WARNING, says=[says], fix="NEREID_DECODE_THREADS=2")


@pytest.mark.parametrize(
    ("hard", "severity"),
    [
        (RESERVED_FILES, Severity.FAILURE),
        (1024, Severity.WARNING),
        (MAX_CONNECTIONS + RESERVED_FILES, Severity.OK),
        (10**6, Severity.OK),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, hard: int, severity: Severity) -> None:
    """A worker needs some files for itself."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (min(hard, 1024), hard))

    assert check(Settings())["open_files"].severity is severity


@pytest.mark.parametrize(("mode", "severity"), [("auto", Severity.WARNING), ("shm", Severity.FAILURE)])
@pytest.mark.parametrize(("room", "left_out"), [(50 * MIB, 1), (0, 2), (None, 2)])
def test_arenas_that_do_not_fit(
    machine: dict[str, Any],
    mode: Literal["auto", "shm"],
    severity: Severity,
    room: int | None,
    left_out: int,
) -> None:
    machine["room"] = room
    finding = check(Settings(workers=2, transport=mode))["dev_shm"]

    assert_useful(finding, severity, says=[f"{left_out} of them"], fix="--shm-size=94m")


def test_the_size_of_the_models_input_decides(machine: dict[str, Any]) -> None:
    """Without a model, 640 x 640 is assumed."""
    settings = Settings(workers=2)
    machine["room"] = 100 * MIB

    assert check(settings, None)["dev_shm"].severity is Severity.OK
    assert check(settings, 4 * UINT8_640)["dev_shm"].severity is Severity.WARNING
    assert_useful(check(settings, MAX_ARENA_BYTES + 1)["dev_shm"], Severity.WARNING, says=["too large"], fix="smaller")


def test_without_shared_memory_its_size_does_not_matter(machine: dict[str, Any]) -> None:
    machine["room"] = 0

    assert "dev_shm" not in check(Settings(), maps_memory=False)
    assert "dev_shm" not in check(Settings(transport="inline"))


@pytest.mark.parametrize(
    ("mebibytes", "settings", "says", "fix"),
    [
        (512, {}, ["of 512 MiB", "the kernel may kill"], "NEREID_MAX_MEGAPIXELS=12"),
        (1024, {"max_megapixels": 12, "max_file_size_mb": 10, "max_batch_size_mb": 20}, [], None),
        # The largest image is admitted whatever the budget: a JPEG, or an AVIF of 128 MiB.
        (2**14, {"memory_mb": 100}, ["NEREID_MEMORY_MB=100"], "NEREID_MEMORY_MB=894"),
        (2**14, {"memory_mb": 100, "max_megapixels": 1}, ["NEREID_MEMORY_MB=100"], "NEREID_MEMORY_MB=528"),
    ],
)
def test_memory(machine: dict[str, Any], mebibytes: int, settings: dict[str, Any], says: list[str], fix: str | None) -> None:
    machine["memory"] = mebibytes * MIB
    finding = check(Settings(workers=1, **settings))["memory"]

    if fix is None:
        assert finding.severity is Severity.OK
    else:
        assert_useful(finding, Severity.WARNING, says=says, fix=fix)


def test_images_bodies_workers_and_arenas_need_memory(machine: dict[str, Any]) -> None:
    machine["memory"] = 4096 * MIB
    message = check(Settings(workers=2, memory_mb=1000))["memory"].message

    assert "1000 MiB each, all in all 2355 of 4096 MiB" in message
