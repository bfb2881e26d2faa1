"""Tritons that become sick after a hundred good answers, behind a gateway of two workers; and hostile callers of a sound one."""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import pytest

from bench.harness.triton import Triton, embedded_triton
from tests.fakes import models as small_models
from tests.fakes.sick import SICKNESSES, Sickness, SickTriton, sick
from tests.faults import corpus
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Answer, ask, encode
from tests.faults.meanwhile import meanwhile
from tests.faults.serving import Gateway, serving
from tests.support import SCENE
from tests.system.test_sick_triton import add_models

_GOOD_CALLS = 100
_ERRORS_SECONDS, _WRONG_SECONDS, _RECOVERY_SECONDS = 10.0, 70.0, 5.0
_STEADY_SECONDS = 5.0
"""How long there must be no wrong answer any more."""
_PATIENCE_SECONDS = 90.0
_ASKED = encode(SCENE)


class Outcome(NamedTuple):
    at: float
    status: int
    found: Any


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Triton]:
    add_models(folder := tmp_path_factory.mktemp("sick"))
    with embedded_triton(folder / "models", "doors") as triton:
        yield triton


@asynccontextmanager
async def gateway_to(triton: Triton, folder: Path, count: int) -> AsyncIterator[tuple[Gateway, list[SickTriton]]]:
    """Run a gateway that reaches a Triton in several ways, which are several Tritons to it."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(sick(triton.address)) for _ in range(count)]
        settings = {"model": "doors", "triton_endpoints": ",".join(proxy.url for proxy in proxies), "log_level": "warning"}
        context = serving(triton, folder, settings=settings)
        gateway = await asyncio.to_thread(context.__enter__)  # the way to Triton leads through this event loop
        try:
            yield gateway, proxies
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)


def outcome_of(answer: Answer) -> Outcome:
    body = json.loads(answer.body)
    return Outcome(monotonic(), answer.status, body.get("detections"))


@pytest.mark.parametrize("sickness", SICKNESSES)
@pytest.mark.parametrize("count", [1, 2], ids=["alone", "beside"])
async def test_a_triton_becomes_sick(
    sound: Triton,
    tmp_path: Path,
    count: int,
    sickness: Sickness,
    record_figure: RecordFigure,
) -> None:
    outcomes: list[Outcome] = []

    async def call(url: str) -> None:
        while True:
            outcomes.append(outcome_of(await ask(url, _ASKED)))
            await asyncio.sleep(0.1)

    def is_bad(outcome: Outcome) -> bool:
        return outcome.status == 502 or (outcome.status == 200 and outcome.found != right)

    async with gateway_to(sound, tmp_path, count) as (gateway, proxies):
        proxy = proxies[0]
        right = outcome_of(await ask(gateway.url, _ASKED)).found
        async with meanwhile(*[call(gateway.url) for _ in range(4)]):
            proxy.good_calls, proxy.sickness = _GOOD_CALLS, sickness
            while proxy.good_calls >= 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            sick_at = monotonic()
            bad_at = sick_at
            while monotonic() - bad_at < _STEADY_SECONDS or not await _is_known(gateway):
                bad_at = max((outcome.at for outcome in outcomes if is_bad(outcome)), default=sick_at)
                assert monotonic() - sick_at < _PATIENCE_SECONDS
                await asyncio.sleep(0.2)
            limit = _ERRORS_SECONDS if sickness == "errors" else _WRONG_SECONDS
            record_figure(f"{sickness}, {count} Triton(s): seconds until the last wrong answer", bad_at - sick_at, limit)
            known_at, after = monotonic(), len(outcomes)
            proxy.sickness = None
            proxy.inferences.clear()
            while not proxy.inferences:
                assert monotonic() - known_at < _PATIENCE_SECONDS
                await asyncio.sleep(0.02)
            record_figure(
                f"{sickness}, {count} Triton(s): seconds until it is used again", monotonic() - known_at, _RECOVERY_SECONDS
            )
            while outcomes[-1].status != 200 or outcomes[-1].at < known_at:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

        assert not any(map(is_bad, outcomes[after:]))
        if count > 1:
            assert {outcome.status for outcome in outcomes} == {200}


async def _is_known(gateway: Gateway) -> bool:
    health = json.loads((await ask(gateway.url, encode(b"", "/health", "GET"))).body)
    return bool(health["tritons"][0]["wrong"])


@pytest.mark.parametrize("minutes", [1, pytest.param(20, marks=pytest.mark.soak)])
async def test_hostile_pictures_and_overload_are_no_sickness(tmp_path: Path, minutes: int) -> None:
    """The default model fails with some pictures; callers send only these for a while, and then far too many of all kinds."""
    small_models.write(tmp_path / "models")
    source = random.Random(4603)  # noqa: S311 - the same images in each run
    valid = list(corpus.valid_images().values())
    poison = encode(small_models.scene("PNG", background="black"))
    statuses = set[int]()

    async def call(url: str, *, is_poison: bool) -> None:
        while True:
            data = source.choice(valid)
            asked = poison if is_poison else encode(corpus.damage(data, source) if source.random() < 0.5 else data)
            statuses.add((await ask(url, asked)).status)

    settings = {"model": "fragile", "log_level": "warning", "timeout_seconds": 1}
    with (
        embedded_triton(tmp_path / "models", "six_columns") as triton,
        serving(triton, tmp_path, settings={**settings, "triton_endpoints": triton.address}) as gateway,
    ):
        async with meanwhile(*[call(gateway.url, is_poison=True) for _ in range(4)]):
            await asyncio.sleep(20 * minutes)
        async with meanwhile(*[call(gateway.url, is_poison=number % 2 == 0) for number in range(64)]):
            await asyncio.sleep(40 * minutes)

        assert 502 in statuses
        assert not [line for line in gateway.log_lines() if line["event"] == "wrong answers"]
        assert (await ask(gateway.url, encode(b"", "/readyz", "GET"))).status == 200
