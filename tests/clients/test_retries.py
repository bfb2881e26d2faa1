"""Requests are repeated where that may help: as Retry-After asks, with pauses that grow, within limits."""

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest

from nereid_client import AsyncClient, Client, Problem, Retries, Unreachable
from tests.clients.responses import detected, refused

AWAY, FULL = httpx.ConnectError("refused"), refused(429, "gateway_full", "2")
Answers = list[httpx.Response | Exception]


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The pauses between attempts, during which only the client's clock goes on; chance always takes the longest."""
    made: list[float] = []

    async def sleep(seconds: float) -> None:
        made.append(seconds)

    with monkeypatch.context() as patch:
        patch.setattr("nereid_client.client.time.sleep", made.append)
        patch.setattr("nereid_client.client.asyncio.sleep", sleep)
        patch.setattr("nereid_client.retries.monotonic", lambda: sum(made))
        patch.setattr("nereid_client.retries.random.uniform", lambda _, most: most)
        yield made


def answering(answers: Answers) -> httpx.MockTransport:
    left = iter(answers)

    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(found := next(left), Exception):
            raise found
        return httpx.Response(found.status_code, headers=found.headers, content=found.content)

    return httpx.MockTransport(answer)


def ask(answers: Answers, retries: Retries = Retries()) -> None:  # noqa: B008 - immutable
    with Client(transport=answering(answers), retries=retries) as client:
        client.detect(b"image")


def ask_async(answers: Answers) -> None:
    async def run() -> None:
        async with AsyncClient(transport=answering(answers)) as client:
            await client.detect(b"image")

    asyncio.run(run())


@pytest.mark.parametrize("ask", [ask, ask_async])
def test_request_is_repeated_as_retry_after_asks(ask: Callable[[Answers], None], pauses: list[float]) -> None:
    unavailable = [refused(503, "", after) for after in ("1", None, "Thu, 26 Nov 2026 06:00:00 GMT")]
    ask([FULL, *unavailable, AWAY, httpx.ReadError("reset"), detected()])

    assert pauses == [2 + 0.2, 1 + 0.4, 0.8, 1.6, 3.2, 6.4]


@pytest.mark.parametrize("answer", [*(refused(status, "") for status in (400, 408, 500, 502, 504)), httpx.ReadTimeout("60 s")])
def test_request_that_would_fail_again_is_not_repeated(answer: httpx.Response | Exception, pauses: list[float]) -> None:
    with pytest.raises((Problem, Unreachable)):
        ask([answer])

    assert pauses == []


def test_attempts_and_time_are_limited(pauses: list[float]) -> None:
    with pytest.raises(Unreachable) as caught:
        ask([AWAY] * 3, Retries(attempts=3))
    assert caught.value.__cause__ is AWAY
    assert len(pauses) == 2
    pauses.clear()
    with pytest.raises(Problem, match="429 gateway_full"):
        ask([FULL] * 3, Retries(total_seconds=5))
    with pytest.raises(Problem, match="503"):
        ask([refused(503, "circuit_open", "120")])
    assert len(pauses) == 2
