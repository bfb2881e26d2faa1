"""Arenas: memory is reserved, slots do not overlap, and files of ended processes are removed."""

import fcntl
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from app.triton import shared_memory
from app.triton.shared_memory import SHM, Arena, room
from tests.support import ROOT


def test_the_name_of_a_region_is_a_secret() -> None:
    """It cannot be guessed from file names, which every user of the host sees, or from other regions."""
    arenas = [Arena(10) for _ in range(3)]
    suffixes = {arena.region.removeprefix(f"{arena.name}-") for arena in arenas}
    files = " ".join(path.name for path in SHM.iterdir())
    for arena in arenas:
        arena.close()

    assert len(suffixes) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", suffix) for suffix in suffixes)
    assert not [suffix for suffix in suffixes if suffix in files]


@pytest.fixture
def own_shm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder in place of /dev/shm that no other process sweeps."""
    monkeypatch.setattr(shared_memory, "SHM", tmp_path)
    return tmp_path


def killed_arena(folder: Path) -> list[str]:
    """Return the command of a process that creates an arena, prints its name and is killed."""
    script = (
        "import os, sys; from pathlib import Path; from app.triton import shared_memory; shared_memory.SHM = Path(sys.argv[1]);"
        "print(shared_memory.Arena(4096).name, flush=True); os.kill(os.getpid(), 9)"
    )
    return [sys.executable, "-c", script, str(folder)]


@pytest.mark.parametrize("name", ["nereid-1-0123abcd", "nereid-4194304-0123abcd"])
def test_a_file_that_is_gone_is_removed(own_shm: Path, name: str) -> None:
    assert shared_memory.is_removed(name)
    (own_shm / name).touch()
    assert not shared_memory.is_removed(name)
    (own_shm / name).unlink()
    assert shared_memory.is_removed(name)


@pytest.mark.parametrize("name", ["", "other", "nereid-1-0123", "nereid-x-0123abcd", "../nereid-1-0123abcd", "nereid-1-0123abcd-1"])
def test_the_file_of_another_program_is_not_ours_to_miss(name: str) -> None:
    assert not shared_memory.is_removed(name)


def test_an_arena_retires_while_threads_take_slots() -> None:
    for _ in range(200):
        made = Arena(20)
        with ThreadPoolExecutor(2) as threads:
            lent = [threads.submit(made.take, 10) for _ in range(2)]
            is_retired = made.retire(only_unused=True)
        slots = [slot for job in lent if (slot := job.result())]

        assert len(slots) == (0 if is_retired else 2)
        made.close()


def test_the_file_contains_what_is_written_to_the_slots() -> None:
    made = Arena(8192)
    slot = made.take(4096)
    assert slot
    slot.array((4,), np.float32)[:] = [1, 2, 3, 4]

    with (SHM / made.name).open("rb") as file:
        file.seek(slot.offset)
        assert np.frombuffer(file.read(16), np.float32).tolist() == [1, 2, 3, 4]
    assert (SHM / made.name).stat().st_size == made.nbytes
    assert (SHM / made.name).stat().st_mode & 0o777 == 0o600
    made.close()
    assert not (SHM / made.name).exists()


def test_memory_outlives_the_file() -> None:
    """A thread may still write when the worker ends."""
    made = Arena(4096)
    slot = made.take(4096)
    assert slot
    made.close()
    array = slot.array((4096,), np.uint8)
    array[:] = 7

    assert array.sum() == 7 * 4096


FULL = """
try: Arena(32 << 20)
except OSError as error: print(error.errno, list(SHM.iterdir()))
made = Arena(8 * 4096)
made.take(4096).array((4096,), np.uint8)[:] = 1
"""
ROOM = """
(SHM / "theirs").write_bytes(bytes(1 << 20))
before = room()
made = Arena(2 << 20)
print(before >> 20, room() >> 20)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm for the test")
@pytest.mark.parametrize(("size", "script", "output"), [("1m", FULL, "28 []"), ("8m", ROOM, "7 7")], ids=["full", "room"])
def test_a_small_dev_shm(size: str, script: str, output: str) -> None:
    script = f"from app.triton.shared_memory import *\n{script}\nmade.close(); print('ok')"
    command = f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" -c "$1"'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.stdout == f"{output}\nok\n", result.stderr


def test_without_dev_shm_there_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("app.triton.shared_memory.SHM", tmp_path / "nowhere")

    assert room() is None


def test_the_arenas_of_killed_workers_are_swept(own_shm: Path) -> None:
    dead = subprocess.run(killed_arena(own_shm), cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    alive = Arena(4096)
    reused = own_shm / f"nereid-{os.getpid()}-00000000"  # as if this process had got the same process id
    (own_shm / dead).rename(reused)

    assert shared_memory.sweep() == [reused.name]
    assert [path.name for path in own_shm.iterdir()] == [alive.name]
    alive.close()


def test_files_that_are_not_arenas_are_left_alone(own_shm: Path) -> None:
    """Any user can create files of any name in /dev/shm; none makes the sweep fail."""
    folder, pipe, link = (own_shm / f"nereid-1-{number:08}" for number in range(3))
    other = own_shm / "nereid-notes"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(own_shm / "nothing")
    other.touch()

    assert shared_memory.sweep() == []
    assert all(os.path.lexists(path) for path in (folder, pipe, link, other))


def test_an_arena_that_is_swept_before_it_is_locked_is_created_again(monkeypatch: pytest.MonkeyPatch, own_shm: Path) -> None:
    """Another worker may sweep between the creation of the file and the lock."""
    lock = fcntl.flock
    swept: list[str] = []

    def late(descriptor: int, how: int) -> None:
        if not swept:
            monkeypatch.setattr(fcntl, "flock", lock)
            swept.extend(shared_memory.sweep())
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    made = Arena(4096)

    assert swept
    assert made.name not in swept
    assert (own_shm / made.name).exists()
    made.close()


def test_the_arena_of_a_zombie_is_swept(own_shm: Path) -> None:
    """In a container without an init process, a killed worker may remain a zombie."""
    with subprocess.Popen(killed_arena(own_shm), cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.read().strip()  # read until the child ends; it remains a zombie until the block ends

        assert name in shared_memory.sweep()
