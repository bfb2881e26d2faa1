"""After which time a Triton that answers nothing is silent."""

import asyncio
from typing import Any

import pytest

from app.triton.silence import Silence
from tests.fakes.clock import Clock
from tests.support import TABLE


class _Client:
    """Answers once it may."""

    address = "silent:8001"

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def read_server(self) -> None:
        await self.may_answer.wait()


@pytest.mark.parametrize(
    ("answered_after", "pause", "missed_after", "is_silent"),
    [
        (0.01, 0, 0.35, True),  # a deadline of 0.6 s, asked after 0.25 s
        (0.5, 0, 0.9, False),  # its CPU is used by others
        (0.5, 0, 1.1, True),
        (0.5, 11, 0.35, True),  # it was, but not lately
        (12, 0, 0.35, True),  # it was stopped, not slow
    ],
)
async def test_a_triton_is_silent_soon_unless_it_was_slow_lately(
    monkeypatch: pytest.MonkeyPatch,
    answered_after: float,
    pause: float,
    missed_after: float,
    is_silent: bool,  # noqa: FBT001
) -> None:
    """A missed deadline is counted in any case, so that nobody is told that the gateway is full."""
    clock = Clock(monkeypatch, "app.triton.silence")
    client: Any = _Client()
    silence = Silence(client, TABLE)
    silence.ask(clock.now, lambda: None)
    clock.now += answered_after
    client.may_answer.set()
    await asyncio.sleep(0)
    client.may_answer.clear()
    clock.now += pause

    silence.ask(clock.now, lambda: None)
    await asyncio.sleep(0)
    clock.now += missed_after
    assert silence.note_missed() is is_silent
    assert silence.missed == 1
    await silence.stop()
    assert silence.missed == 0
