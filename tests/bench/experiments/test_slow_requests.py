"""The recording of a service that runs, by the real py-spy, while its requests are slow."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from app.api.caller.keys import create
from app.host.http import get_status
from app.host.processes import end_group
from bench.__main__ import main
from bench.harness.lineup import Lineup
from bench.harness.processes import ROOT, environment_of, variables
from bench.harness.triton import Triton
from tests.bench.support import needs_ptrace
from tests.processes import wait_for
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture

_STOP_SECONDS = 30
pytestmark = needs_ptrace

# Sends a PNG of 3 MB again and again; a request for it takes more than 5 ms.
_CALLS = """
import sys
import httpx
from bench.load.images import noise
url, socket, key = sys.argv[1:]
headers, image = {"Content-Type": "image/png", "X-API-Key": key}, noise("PNG", (1000, 1000, 3))
client = httpx.Client(transport=httpx.HTTPTransport(uds=socket or None), headers=headers, timeout=None)
while True:
    client.post(f"{url}/detect", content=image).raise_for_status()
"""


@contextmanager
def calling(url: str, socket: str = "", key: str = "") -> Iterator[None]:
    """Send slow requests to a URL, over a unix socket and with a key if they are given."""
    with subprocess.Popen([sys.executable, "-c", _CALLS, url, socket, key], env=environment_of(ROOT)) as caller:
        try:
            yield
        finally:
            caller.kill()


def profile(out: Path, *options: object, seconds: int = 30) -> int:
    return main(["profile", str(seconds), str(out), *map(str, options)])


def test_a_service_at_a_port_is_recorded_while_its_requests_are_slow(
    fixtures: Triton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lineup, out = Lineup(fixtures, 2, tmp_path), tmp_path / "out.svg"
    with lineup.start(lineup.contestant("nereid_inline", "null")) as server:
        assert profile(out, "--url", server.url, "--slow", 20_000, seconds=1) == 1
        assert capsys.readouterr().err == "no request took over 20000 ms within 1 s\n"
        assert not out.exists()

        with calling(server.url):
            assert profile(out, "--url", server.url, "--slow", 5) == 0
        workers = [child.pid for child in server.process.children()]

    assert "(app/imaging/" in out.read_text()
    said = re.fullmatch(
        rf"{out}: 5 s of worker (\d+); meanwhile (\d+) requests to all workers took over 5 ms\n", capsys.readouterr().out
    )
    assert said is not None
    assert int(said[1]) in workers
    assert int(said[2]) > 0


def test_a_process_that_needs_a_key_at_a_unix_socket_is_recorded(
    fixtures: Triton, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an instance behind NGINX: its socket is found from the process, and the key is for its metrics."""
    credential, table = create("prometheus")
    (tmp_path / "keys.toml").write_text(table.replace('"detect"', '"detect", "health"'), encoding="utf-8")
    (key_file := tmp_path / "key").write_text(f"{credential}\n", encoding="utf-8")
    socket, out = tmp_path / "api.sock", tmp_path / "out.svg"
    settings = msgspec.structs.replace(
        fixtures.settings, model="null", socket=str(socket), api_keys_file=str(tmp_path / "keys.toml"), workers=1, log_level="error"
    )
    with subprocess.Popen([sys.executable, "-m", "app", "api"], env={**environment_of(ROOT), **variables(settings)}) as api:
        try:
            wait_for(lambda: get_status("http://localhost/readyz", 1, socket) == 200)
            assert profile(out, "--pid", api.pid, seconds=1) == 1
            assert capsys.readouterr().err == "http://localhost/metrics needs an API key with the scope health: --key-file\n"

            with calling("http://localhost", str(socket), credential):
                assert profile(out, "--pid", api.pid, "--key-file", key_file, "--slow", 5) == 0
        finally:
            end_group(api, _STOP_SECONDS)

    assert "(app/imaging/" in out.read_text()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--pid", 2**22 + 1], f"there is no process {2**22 + 1}"),
        (["--url", "http://192.0.2.1:4603"], "http://192.0.2.1:4603 is not on this machine, whose processes alone can be recorded"),
        (["--url", "unix:/none"], "no worker that this user may watch listens at unix:/none; behind NGINX: unix:PATH, or --pid"),
    ],
    ids=["no process", "another machine", "nobody"],
)
def test_an_impossible_recording_is_one_line(options: list[object], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert profile(Path("none.svg"), *options) == 1
    assert capsys.readouterr().err == f"{reason}\n"


def test_another_program_cannot_be_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as other:
        try:
            assert profile(Path("none.svg"), "--pid", other.pid) == 1
        finally:
            other.kill()
    assert capsys.readouterr().err == f"process {other.pid} is not a Nereid: it is no worker, and has none\n"
