"""Slots in shared memory: really reserved, never shared, and never left behind."""

import fcntl
import os
import subprocess
import sys

import numpy as np
import pytest

from app import arena
from app.arena import SHM, Arena
from tests.conftest import ROOT


def test_slots_do_not_overlap() -> None:
    """What is written to one is not seen in another, whatever their size."""
    made = Arena(5000, 3)
    slots = [made.take() for _ in range(3)]
    arrays = [slot.array((50, 100), np.uint8) for slot in slots if slot]
    for value, array in enumerate(arrays):
        array[:] = value
    made.close()

    assert [array.min() for array in arrays] == [array.max() for array in arrays] == [0, 1, 2]
    assert len({slot.offset for slot in slots if slot}) == 3
    assert all(slot.offset % 4096 == 0 for slot in slots if slot)


def test_a_slot_is_lent_to_one_at_a_time() -> None:
    """When all are out there is none, until one is given back."""
    made = Arena(10, 1)
    slot = made.take()
    assert slot
    assert made.take() is None
    slot.free()

    assert made.take() == slot
    made.close()


def test_the_file_is_what_the_slots_show() -> None:
    """Whoever maps the file of that name reads what was written."""
    made = Arena(4096, 2)
    slot = made.take()
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
    """A request that is still writing when the worker ends writes into its own memory."""
    made = Arena(4096, 1)
    slot = made.take()
    assert slot
    made.close()
    array = slot.array((4096,), np.uint8)
    array[:] = 7

    assert array.sum() == 7 * 4096


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small /dev/shm for the test")
def test_a_full_dev_shm_is_an_error_not_a_crash() -> None:
    """The space is reserved before the first write; nothing is left of the attempt."""
    script = (
        "from app.arena import *\n"
        "try: Arena(1 << 20, 32)\n"
        "except OSError as error: print(error.errno, list(SHM.iterdir()))\n"
        "made = Arena(4096, 8); made.take().array((4096,), np.uint8)[:] = 1; made.close(); print('ok')"
    )
    command = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -c "$1"'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable, script], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert result.stdout == "28 []\nok\n", result.stderr


def test_what_killed_workers_left_is_swept() -> None:
    """The arena of a process that is gone is removed, whatever its number; those of the living are not."""
    script = "import os; from app.arena import Arena; print(Arena(4096, 1).name, flush=True); os.kill(os.getpid(), 9)"
    dead = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    alive = Arena(4096, 1)
    reborn = SHM / f"nereid-{os.getpid()}-00000000"
    (SHM / dead).rename(reborn)
    swept = arena.sweep()

    try:
        assert reborn.name in swept
        assert not reborn.exists()
        assert alive.name not in swept
        assert (SHM / alive.name).exists()
    finally:
        alive.close()


def test_what_cannot_be_swept_stops_nobody() -> None:
    """Anybody can write to /dev/shm, under any name; what is none of ours is left alone."""
    folder, pipe, link = (SHM / f"nereid-1-{number:08}" for number in range(3))
    other = SHM / "nereid-notes"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(SHM / "nothing")
    other.touch()

    try:
        assert not {folder.name, pipe.name, link.name, other.name} & set(arena.sweep())
    finally:
        folder.rmdir()
        for path in (pipe, link, other):
            path.unlink()


def test_an_arena_swept_before_it_was_locked_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a moment between the two."""
    lock = fcntl.flock
    swept: list[str] = []

    def late(descriptor: int, how: int) -> None:
        if not swept:
            monkeypatch.setattr(fcntl, "flock", lock)
            swept.extend(arena.sweep())
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    made = Arena(4096, 1)

    assert swept
    assert made.name not in swept
    assert (SHM / made.name).exists()
    made.close()


def test_a_dead_process_that_nobody_has_buried_is_dead() -> None:
    """In a container without an init it may stay for ever."""
    script = "import os; from app.arena import Arena; print(Arena(4096, 1).name, flush=True); os.kill(os.getpid(), 9)"
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        name = child.stdout.read().strip()  # its end is the child's, which is not waited for until the block ends

        assert name in arena.sweep()
