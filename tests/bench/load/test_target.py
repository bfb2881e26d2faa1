"""Load is only sent to this machine."""

import pytest

from bench.load.closed_loop import drive_closed_loop
from bench.load.target import Target, local_target
from tests.bench.support import SAMPLE


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1",
        "http://example.com:80/detect",
        "http://127.0.0.1.example.com",
        "https://127.0.0.1",
        "http://0.0.0.0",
        "detect",
    ],
)
async def test_another_host_is_rejected(url: str) -> None:
    with pytest.raises(ValueError, match=r"only be sent to this machine|does not start with"):
        await drive_closed_loop(url, [SAMPLE], clients=1, seconds=1)


def test_a_target_has_host_port_and_path() -> None:
    assert local_target("http://[::1]:82/detect?a=b") == Target("::1", 82, "[::1]:82", "/detect?a=b")
    assert local_target("http://localhost") == Target("localhost", 80, "localhost", "/")
