"""Tensors in shared memory, whose files leave nothing behind, and inline where shared memory is not available."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from app.main import create_app
from app.settings.schema import Settings
from app.triton import shared_memory
from app.triton.client import TritonClient
from app.triton.shared_memory import Arena, Slot
from app.triton.transport import Mode
from tests.machines import Machine, check
from tests.support import NEEDS_BYTES, ROOT, SCENE, json, own_arenas, started, transport_in_use

REGISTER = TritonClient.register


async def register_elsewhere(client: TritonClient, arena: Arena) -> None:
    """Register an arena whose file Triton cannot find, as if it ran on another host."""
    elsewhere: Any = SimpleNamespace(name=f"{arena.name}-of-another-host", region=arena.region, nbytes=arena.nbytes)
    await REGISTER(client, elsewhere)


PATCHES: dict[str, tuple[str, object]] = {
    "full": ("app.triton.transport.Arena", Mock(side_effect=OSError(28, "No space left on device"))),
    "elsewhere": ("app.triton.client.TritonClient.register", register_elsewhere),
}


@NEEDS_BYTES
@pytest.mark.usefixtures("served")
async def test_file_travels_through_shared_memory_if_it_fits(settings: Settings) -> None:
    async with started(create_app(msgspec.structs.replace(settings, transport="shm"))) as client:
        for more in (0, 1 << 20):
            found = json(await client.post("/predict/file_in", content=SCENE + bytes(more)))["detections"]
            assert [d["class_name"] for d in found] == ["red", "blue"]


@pytest.mark.parametrize(
    ("mode", "cause", "status", "in_use"),
    [
        ("auto", "", 200, "shm"),
        ("inline", "", 200, "inline"),
        ("auto", "full", 200, "inline"),
        ("auto", "elsewhere", 200, "inline"),
        ("shm", "elsewhere", 503, "inline"),
    ],
)
@pytest.mark.usefixtures("served")
async def test_tensors_go_inline_without_shared_memory_if_they_may(  # noqa: PLR0913, PLR0917 - a table
    settings: Settings, monkeypatch: pytest.MonkeyPatch, mode: Mode, cause: str, status: int, in_use: str
) -> None:
    before = own_arenas()
    if cause:
        monkeypatch.setattr(*PATCHES[cause])
    async with started(create_app(msgspec.structs.replace(settings, transport=mode))) as client:
        assert (await client.post("/predict/six_columns", content=SCENE)).status_code == status
        assert await transport_in_use(client) == in_use

    assert set(own_arenas()) <= set(before)  # others, which are idle, may have been removed


NBYTES = 60


class Parts(Machine):
    """An arena lends the first room after the last slot, or else the first room, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(NBYTES)
        self.memory = bytearray(NBYTES)
        """The number of the slot that each byte belongs to; 0 if to none."""
        self.lent: dict[int, Slot] = {}
        self.last = self.number = 0
        """End of the last slot, and its number."""
        self.is_retired = False

    @rule(nbytes=st.sampled_from([1, 5, 10, 10, 15, 20, 30]))
    def take(self, nbytes: int) -> None:
        self.last = self.last if self.lent else 0
        starts = [*range(self.last, NBYTES - nbytes + 1), *range(NBYTES - nbytes + 1)]
        free = [start for start in starts if not self.is_retired and not any(self.memory[start : start + nbytes])]
        slot = self.arena.take(nbytes)
        assert (slot and slot.offset) == (free[0] if free else None)
        if slot is not None:
            self.number = self.number % 255 + 1
            self.memory[slot.offset : slot.end] = [self.number] * nbytes
            slot.array((nbytes,), np.uint8)[:] = self.number
            self.lent[slot.offset], self.last = slot, slot.end

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        slot = self.lent.pop(data.draw(st.sampled_from(sorted(self.lent))))
        self.memory[slot.offset : slot.end] = bytes(slot.end - slot.offset)
        slot.free()

    @rule(offset=st.integers(-1, NBYTES))
    def give_back_what_is_not_lent(self, offset: int) -> None:
        if offset not in self.lent:
            with pytest.raises(ValueError, match="not in list"):
                self.arena.give_back(Slot(self.arena, offset, offset + 1))

    @precondition(lambda self: self.number > 5)
    @rule(is_unconditional=st.booleans())
    def retire(self, is_unconditional: bool) -> None:  # noqa: FBT001
        if is_unconditional:
            self.arena.retire()
        assert self.arena.retire(only_unused=True) == (not self.lent)
        self.is_retired = self.is_retired or is_unconditional or not self.lent

    @invariant()
    def slots_do_not_overlap(self) -> None:
        for slot in self.lent.values():
            assert slot.array((slot.end - slot.offset,), np.uint8).tobytes() == self.memory[slot.offset : slot.end]
        assert self.arena.lent_bytes == NBYTES - self.memory.count(0)

    def finish(self) -> None:
        self.arena.close()


@pytest.mark.parametrize("runs", [40, pytest.param(120, marks=pytest.mark.system)])
def test_slots_of_an_arena(runs: int) -> None:
    check(Parts, runs=runs, steps=40)


def test_arenas_of_killed_workers_are_swept_and_other_files_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also while a killed worker is a zombie, as without an init process. Any user can create files of any name in /dev/shm."""
    script = (
        "import os, sys; from pathlib import Path; from app.triton import shared_memory; shared_memory.SHM = Path(sys.argv[1]);"
        "print(shared_memory.Arena(4096).name, flush=True); os.kill(os.getpid(), 9)"
    )
    monkeypatch.setattr(shared_memory, "SHM", tmp_path)  # which no other process sweeps
    alive = Arena(4096)
    folder, pipe, link = (tmp_path / f"nereid-1-{number:08}" for number in range(3))
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(tmp_path / alive.name)
    other = tmp_path / "nereid-notes"
    other.touch()
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        dead = child.stdout.read().strip()  # until it ends; it remains a zombie until the block ends
        reused = tmp_path / f"nereid-{os.getpid()}-00000000"  # as if this process had got the same process id
        (tmp_path / dead).rename(reused)
        assert shared_memory.sweep() == [reused.name]

    assert set(tmp_path.iterdir()) == {tmp_path / alive.name, folder, pipe, link, other}
    alive.close()
