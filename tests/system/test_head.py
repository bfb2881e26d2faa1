"""HEAD as `curl -I` sends it, to the real server."""

import re
from pathlib import Path

from tests.fakes.triton import FakeTriton, serving
from tests.faults.exchange import Connection, encode
from tests.system.gateway import running_gateway


async def test_the_server_sends_the_headers_alone(tmp_path: Path) -> None:
    """With the length of the body that GET has, also of a file that the server would send itself."""
    wanted = {"/livez": (200, 1), "/docs-assets/swagger_style.css": (200, 10_000), "/nowhere": (404, 1)}
    async with serving(fake := FakeTriton()), running_gateway(fake.url, tmp_path, workers=1) as gateway:
        for path, (status, least_bytes) in wanted.items():
            async with await Connection.open(gateway.url) as connection:
                await connection.send(encode(b"", path, "HEAD", Connection="close"))
                head, _, rest = (await connection.reader.read(-1)).decode().lower().partition("\r\n\r\n")

            assert head.startswith(f"http/1.1 {status} ")
            assert rest == ""
            assert "\r\nx-process-time: " in head
            assert [int(length) >= least_bytes for length in re.findall(r"\r\ncontent-length: (\d+)", head)] == [True]
