"""HTTP as the real server speaks it: answers before the whole body was sent, and HEAD."""

import json
import re
from collections.abc import AsyncIterator

import pytest

from tests.api.conftest import write_keys
from tests.faults.exchange import Connection, encode
from tests.faults.serving import Gateway, running_gateway
from tests.support import free_port

SECRET = "a-secret"  # noqa: S105 - it protects nothing
KEY = f"X-API-Key: camera.{SECRET}"


@pytest.fixture(scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    """A gateway of one worker that needs a key and accepts 6 MiB."""
    folder = tmp_path_factory.mktemp("gateway")
    keys = write_keys(folder, ("camera", SECRET, "detect health"))
    options = {"workers": 1, "max_file_size_mb": 6, "api_keys_file": keys}
    async with running_gateway(f"127.0.0.1:{free_port()}", folder, **options) as running:
        yield running


@pytest.fixture
async def connection(gateway: Gateway) -> AsyncIterator[Connection]:
    async with await Connection.open(gateway.url) as connection:
        yield connection


def head(*lines: str, length: int = 5 * 2**20) -> bytes:
    return "\r\n".join(["POST /detect HTTP/1.1", "Host: nereid", f"Content-Length: {length}", *lines, "", ""]).encode()


async def exchange(connection: Connection, request: bytes) -> tuple[int, str]:
    """Send a head, receive the answer, and only then send the whole body."""
    await connection.send(request)
    answer = await connection.receive()
    await connection.send(bytes(int(request.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])))
    return answer.status, json.loads(answer.body)["code"]


async def is_alive(connection: Connection) -> bool:
    answer = await connection.ask(encode(b"", "/livez", "GET"))
    return (answer.status, answer.body) == (200, b'{"status":"alive"}')


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (head("Content-Type: image/jpeg"), (401, "unauthorized")),
        (head(KEY, "Content-Encoding: br"), (415, "unsupported_media_type")),
        (head(KEY, length=7 * 2**20), (413, "body_too_large")),
    ],
    ids=["401", "415", "413"],
)
async def test_an_early_answer_reaches_a_client_that_goes_on_sending(
    connection: Connection, request_: bytes, expected: tuple[int, str]
) -> None:
    assert await exchange(connection, request_) == expected
    assert await is_alive(connection)


async def test_a_chunked_body_that_is_too_large_is_answered(connection: Connection) -> None:
    lines = ["POST /detect HTTP/1.1", "Host: nereid", KEY, "Transfer-Encoding: chunked", "", ""]
    await connection.send("\r\n".join(lines).encode())
    for _ in range(8):
        await connection.send(b"100000\r\n" + bytes(2**20) + b"\r\n")
    answer = await connection.receive()
    assert (answer.status, json.loads(answer.body)["code"]) == (413, "body_too_large")
    await connection.send(b"0\r\n\r\n")

    assert await is_alive(connection)


@pytest.mark.parametrize(
    ("path", "status", "least_bytes"), [("/livez", 200, 1), ("/docs-assets/swagger_style.css", 200, 10_000), ("/nowhere", 404, 1)]
)
async def test_head_is_answered_with_the_headers_alone(connection: Connection, path: str, status: int, least_bytes: int) -> None:
    """With the length of the body that GET has, also of a file that the server would send itself."""
    await connection.send(encode(b"", path, "HEAD", Connection="close"))
    answered, _, rest = (await connection.reader.read(-1)).decode().lower().partition("\r\n\r\n")

    assert answered.startswith(f"http/1.1 {status} ")
    assert rest == ""
    assert "\r\nx-process-time: " in answered
    assert [int(length) >= least_bytes for length in re.findall(r"\r\ncontent-length: (\d+)", answered)] == [True]
