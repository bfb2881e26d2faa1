"""The Python client: which requests it repeats, when, and what it does beside a proxy of the environment."""

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest

from nereid_client import AsyncClient, Client, Problem, Retries, Unreachable
from tests.clients.conftest import detected, refused
from tests.support import free_port

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


def ask(
    answers: Answers,
    retries: Retries = Retries(),  # noqa: B008 - immutable
    *,
    is_async: bool = False,
    call: Callable[[Client], object] = lambda client: client.detect(b"image"),
) -> None:
    left = iter(answers)

    def answer(_: httpx.Request) -> httpx.Response:
        if isinstance(found := next(left), Exception):
            raise found
        return httpx.Response(found.status_code, headers=found.headers, content=found.content)

    async def ask_async() -> None:
        async with AsyncClient(transport=httpx.MockTransport(answer), retries=retries) as client:
            await client.detect(b"image")

    if is_async:
        asyncio.run(ask_async())
    else:
        with Client(transport=httpx.MockTransport(answer), retries=retries) as client:
            call(client)


@pytest.mark.parametrize("is_async", [False, True])
def test_request_is_repeated_as_retry_after_asks(pauses: list[float], *, is_async: bool) -> None:
    unavailable = [refused(503, "", after) for after in ("1", None, "Thu, 26 Nov 2026 06:00:00 GMT")]
    ask([FULL, *unavailable, AWAY, httpx.ReadError("reset"), detected()], is_async=is_async)

    assert pauses == [2 + 0.2, 1 + 0.4, 0.8, 1.6, 3.2, 6.4]


def test_attempts_and_time_are_limited_and_other_requests_not_repeated(pauses: list[float]) -> None:
    failures: Answers = [*(refused(status, "") for status in (400, 408, 500, 502, 504)), httpx.ReadTimeout("60 s")]
    for answer in failures:
        with pytest.raises((Problem, Unreachable)):
            ask([answer])
    assert pauses == []
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


@pytest.mark.usefixtures("pauses")
def test_repeated_deletion_and_ingest_are_done_once() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        if len(asked) % 2:
            raise httpx.ReadError("reset")
        return refused(404, "") if request.method == "DELETE" else detected(image_id="one", status="")

    with Client(transport=httpx.MockTransport(answer)) as client:
        assert client.delete_image("one").total_deleted == 0
        client.ingest(b"image", skip_duplicates=False)
        assert (asked[2].url, "image_id=" in str(asked[2].url)) == (asked[3].url, True)


def test_deletion_that_was_never_sent_is_not_taken_for_done(pauses: list[float]) -> None:
    with pytest.raises(Problem, match="404"):
        ask([AWAY, refused(404, "")], call=lambda client: client.delete_image("one"))
    assert len(pauses) == 1


def test_proxies_of_the_environment_are_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    for host, is_named in (("127.0.0.1", False), ("gateway.example", True)):
        with Client(f"http://{host}:{free_port()}", retries=Retries(attempts=1)) as client, pytest.raises(Unreachable) as caught:
            client.delete_image("one")
        assert ("the environment names a proxy" in str(caught.value)) is is_named
