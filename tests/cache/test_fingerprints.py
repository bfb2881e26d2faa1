"""Fingerprints are read in the background, and not used for long without being read again."""

import asyncio
import threading

import pytest

from app.cache import fingerprints as fingerprints_module
from app.cache.fingerprints import Fingerprints
from tests.fakes.triton import SPEC
from tests.support import captured_log, eventually
from tests.world import time_of_app


async def test_new_model_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints_module, "_INTERVAL_SECONDS", 1000.0)
    fingerprints = Fingerprints(lambda name, version: f"{name} {version}".encode())
    task = asyncio.create_task(fingerprints.run())
    await fingerprints.refresh()
    assert fingerprints.get(SPEC) == b""

    await eventually(lambda: fingerprints.get(SPEC) == b"tiny 1")
    task.cancel()


async def test_disk_that_does_not_answer_blocks_one_thread() -> None:
    """The others hash large images."""
    reads: list[str] = []
    is_back = threading.Event()

    def read(name: str, _: str) -> bytes:
        reads.append(name)
        is_back.wait()
        return b"network"

    fingerprints = Fingerprints(read)
    confirming = [asyncio.create_task(fingerprints.confirm(SPEC, b"network")) for _ in range(64)]
    await eventually(lambda: reads != [])
    assert await asyncio.to_thread(len, reads) == 1
    is_back.set()

    assert await asyncio.gather(*confirming) == [True] * 64


async def test_changes_are_followed_also_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, fingerprints_module)
    answers = [b"one", b"", b"two"]

    def read(_: str, __: str) -> bytes:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if not answer:
            raise ZeroDivisionError
        return answer

    monkeypatch.setattr(fingerprints_module, "_INTERVAL_SECONDS", 0.01)
    fingerprints = Fingerprints(read)
    fingerprints.get(SPEC)
    task = asyncio.create_task(fingerprints.run())
    await eventually(lambda: fingerprints.get(SPEC) == b"two")
    task.cancel()
    assert len(log) == 1


async def test_old_fingerprints_are_not_used() -> None:
    with time_of_app() as time:
        fingerprints = Fingerprints(lambda *_: b"network")
        fingerprints.get(SPEC)
        await fingerprints.refresh()
        assert fingerprints.get(SPEC) == b"network"
        await time.skip(6)

        assert fingerprints.get(SPEC) == b""
        assert not await fingerprints.confirm(SPEC, b"")
