"""HEAD as `curl -I` sends it, to the real server."""

import asyncio
from pathlib import Path

from tests.fakes.triton import FakeTriton, serving
from tests.system.gateway import running_gateway


async def head(port: int, path: str) -> tuple[str, dict[str, str], bytes]:
    """Return the status line, the headers and whatever follows them until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"HEAD {path} HTTP/1.1\r\nHost: nereid\r\nConnection: close\r\n\r\n".encode())
    answer = await reader.read(-1)
    writer.close()
    await writer.wait_closed()
    start, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = start.decode().split("\r\n")
    pairs = [line.partition(": ") for line in lines]
    return status, {name.lower(): value for name, _, value in pairs}, rest


async def test_the_server_sends_the_headers_alone(tmp_path: Path) -> None:
    """With the length of the body that GET has, also of a file that the server would send itself."""
    async with serving(fake := FakeTriton()), running_gateway(fake.url, tmp_path, workers=1) as gateway:
        answers = {path: await head(gateway.port, path) for path in ("/livez", "/docs-assets/swagger_style.css", "/nowhere")}

    assert [status for status, _, _ in answers.values()] == ["HTTP/1.1 200 OK", "HTTP/1.1 200 OK", "HTTP/1.1 404 Not Found"]
    assert [rest for _, _, rest in answers.values()] == [b"", b"", b""]
    for _, headers, _ in answers.values():
        assert headers["x-process-time"].endswith("ms")
        assert int(headers["content-length"]) > 0
    assert int(answers["/docs-assets/swagger_style.css"][1]["content-length"]) > 10_000
