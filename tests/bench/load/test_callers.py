"""Callers that share a server, on real sockets."""

import asyncio
from collections import Counter

import pytest

from bench.load import callers
from bench.load.callers import Answers, Caller, Request, flood, probe
from tests.bench.support import CAT, always, answer, serving, silent

REQUEST = Request("/detect", {"content-length": "5"}, b"image")
CALLER = Caller(REQUEST, "id.secret", "127.1.0.1")
FULL = answer(b"", "429 Too Many Requests", "retry-after: 60", "connection: close")


async def test_a_rejected_client_sends_its_next_request_at_once() -> None:
    """Over a new connection if necessary; each caller sends its own key, and has its own count."""
    keys: Counter[bytes] = Counter()

    async def reply(_number: int, request: bytes) -> bytes:
        credential = request.partition(b"Bearer ")[2].partition(b"\r\n")[0]
        keys[credential] += 1
        return FULL if credential == b"id.secret" else answer(CAT)

    async with serving(reply) as server:
        both = [CALLER._replace(clients=3), CALLER._replace(credential="other.secret", address="127.1.0.2")]
        rejected, served = await flood(server.url, both, 0.5)

    assert rejected["429"] > 6
    assert served["200"] > 6
    assert set(rejected) | set(served) == {"429", "200"}
    assert set(keys) == {b"id.secret", b"other.secret"}


async def test_slow_uploads_send_the_rest_of_their_body_in_pieces() -> None:
    """A request of two pieces is complete only after the second one."""
    body = bytes(200)
    slow = CALLER._replace(request=Request("/", {"content-length": "200"}, body), bytes_per_second=200, clients=2)
    complete = []

    async def reply(_number: int, request: bytes) -> bytes:
        complete.append(request.endswith(body))
        return answer(CAT)

    async with serving(reply) as server:
        (statuses,) = await flood(server.url, [slow], 3)

    assert statuses["200"] == len(complete) >= 2
    assert all(complete)


async def test_the_measured_caller_does_not_wait_for_answers() -> None:
    """A server that answers nobody before all have asked gets all requests; rejections have no latency."""
    everyone = asyncio.Event()

    async def reply(number: int, _request: bytes) -> bytes:
        if number == 19:
            everyone.set()
        await everyone.wait()
        return answer(CAT) if number % 2 else answer(b"", "429 Too Many Requests")

    async with serving(reply) as server:
        answers = await probe(server.url, CALLER, 100, 0.2)

    assert answers.statuses == {"200": 10, "429": 10}
    assert answers.served == 0.5
    assert len(answers.milliseconds) == 10


@pytest.mark.parametrize("is_silent", [True, False])
async def test_no_answer_counts_as_the_whole_patience(monkeypatch: pytest.MonkeyPatch, is_silent: bool) -> None:  # noqa: FBT001
    """Whether the server is silent or closes the connection."""
    monkeypatch.setattr(callers, "PATIENCE_SECONDS", 0.2)
    never = asyncio.Event()
    async with serving(silent(never) if is_silent else always(None)) as server:
        answers = await probe(server.url, CALLER, 20, 0.2)
        never.set()

    assert answers.statuses == {"error": 4}
    assert answers.milliseconds == [200] * 4


def test_a_percentile_is_one_of_the_times() -> None:
    answers = Answers(Counter({"200": 4}), [1, 2, 3, 4])

    assert [answers.percentile(percent) for percent in (50, 75, 99)] == [2, 3, 4]
    assert Answers(Counter({"429": 1}), []).percentile(50) == float("inf")
