"""Tensors in shared memory, whose files leave nothing behind, and inline where shared memory is not available."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.main import create_app
from app.settings.schema import Settings
from app.triton import shared_memory
from app.triton.client import TritonClient
from app.triton.ring import Ring
from app.triton.shared_memory import Arena
from app.triton.transport import Mode
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


@given(st.lists(st.integers(-9, 30), max_size=40))
def test_next_part_is_the_first_room_after_the_last_one_or_else_at_all(steps: list[int]) -> None:
    """A positive step takes so many bytes; another one gives one of the parts back."""
    ring, memory, last = Ring(NBYTES), bytearray(NBYTES), 0
    lent: dict[int, int] = {}
    """End of each part, by its offset."""
    for step in steps:
        if step > 0:
            starts = [*range(last if lent else 0, NBYTES - step + 1), *range(NBYTES - step + 1)]
            expected = next((start for start in starts if not any(memory[start : start + step])), None)
            assert ring.take(step) == expected
            if expected is not None:
                last = lent[expected] = expected + step
                memory[expected:last] = b"x" * step
        elif lent:
            start = sorted(lent)[step % len(lent)]
            end = lent.pop(start)
            memory[start:end] = bytes(end - start)
            ring.give_back(start, end)
            with pytest.raises(ValueError, match="not in list"):
                ring.give_back(start, end)
        assert ring.lent_bytes == memory.count(b"x")


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
