"""The workers of the API as a user runs it, in real processes: replaced when they do not respond, cannot start or grow."""

import asyncio
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trustme

from app.api.caller import keys
from app.server import Server
from app.settings.schema import Settings
from tests.fakes.triton import FakeTriton
from tests.processes import has_ended, nothing_left_running  # noqa: F401 - a fixture
from tests.running_api import BEATS, Api, running, triton_of_api  # noqa: F401 - a fixture
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import SCENE, eventually, until


@pytest.mark.system
async def test_a_worker_that_does_not_respond_is_replaced(fake: FakeTriton, tmp_path: Path) -> None:
    async with running(fake, tmp_path, BEATS, workers=2) as api:
        await until(partial(api.has_noted, alive=2))
        stopped, other = api.workers()
        stopped.suspend()

        async def is_replaced() -> bool:
            return has_ended(stopped) and len(api.workers()) == 2

        await until(is_replaced)
        assert other in api.workers()

        async def answers() -> bool:
            return (await api.detect()).status_code == 200

        await until(answers)
        assert f"nereid: worker {stopped.pid} does not respond; replacing it" in api.messages
        api.process.terminate()
        assert await api.exit_code() == 0


FAILING_START = """
import os, app.server
from app.api import application
app.server._MAX_PAUSE_SECONDS = 0.1
app.server._HANDOVER_SECONDS = 3.0
build = application.build
def build_or_fail(*arguments):
    if os.path.exists(os.environ["NEREID_SOCKET"] + ".broken"):
        raise SystemExit("broken")
    return build(*arguments)
application.build = build_or_fail
"""
"""No worker can start while there is a certain file."""


@pytest.mark.system
async def test_a_worker_that_cannot_start_does_not_end_the_others(fake: FakeTriton, tmp_path: Path) -> None:
    broken = tmp_path / "api.sock.broken"
    async with running(fake, tmp_path, FAILING_START, workers=2) as api:

        async def workers() -> object:
            return (await api.client.get("/health")).json()["workers"]

        async def are_all_there() -> bool:
            return await workers() == {"running": 2, "wanted": 2}

        async def is_said(text: str, times: int = 1) -> bool:
            assert await api.status("/readyz") == 200
            return sum(text in message for message in api.messages) >= times

        await until(are_all_there)
        ended, other = api.workers()
        broken.touch()
        ended.kill()
        await until(partial(is_said, "5 times in a row"))
        assert api.workers()[0] == other
        assert (await api.detect()).status_code == 200
        assert await workers() == {"running": 1, "wanted": 2}

        broken.unlink()
        await until(are_all_there)
        before = api.workers()
        broken.touch()
        api.process.send_signal(signal.SIGHUP)
        await until(partial(is_said, "renewing worker-", times=2))
        await until(partial(is_said, "stays, because its successor cannot start", times=2))
        assert api.workers() == before
        api.process.terminate()
        assert await api.exit_code() == 0


@pytest.mark.system
async def test_an_api_of_which_no_worker_can_start_ends(fake: FakeTriton, tmp_path: Path) -> None:
    (tmp_path / "api.sock.broken").touch()
    api = Api(fake.url, tmp_path, FAILING_START, workers=2)

    assert await api.exit_code() == 1
    assert sum("cannot start, and no other serves" in message for message in api.messages) == 1
    await api.client.aclose()


@pytest.mark.system
async def test_files_that_become_invalid_do_not_end_the_workers(fake: FakeTriton, tmp_path: Path) -> None:
    credential, table = keys.create("camera-1")
    contents = {
        "keys.toml": table.replace('["detect"]', '["detect", "health"]'),
        "ca.crt": trustme.CA().cert_pem.bytes().decode(),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    more: dict[str, Any] = {"api_keys_file": tmp_path / "keys.toml", "triton_tls_folder": tmp_path}
    patch = "import app.server; app.server._HANDOVER_SECONDS = 3.0"
    async with running(fake, tmp_path, patch, workers=2, **more) as api:
        api.client.headers["x-api-key"] = credential
        for name in contents:
            (tmp_path / name).write_text("", encoding="utf-8")
        first = set(api.workers())

        async def are_replaced(count: int) -> bool:
            assert await api.answers("/models", 503)  # the key is valid; there is no TLS at this Triton
            return len(api.workers()) == 2 and len(set(api.workers()) - first) == count

        api.workers()[0].kill()
        await until(partial(are_replaced, 1))
        api.process.send_signal(signal.SIGHUP)
        await until(partial(are_replaced, 2))

        async def is_told() -> bool:
            refused = (await api.client.get("/health")).json()["refused_files"]
            return sorted(refused) == ["api_keys", "triton_tls"]

        await until(is_told)
        api.process.terminate()
        assert await api.exit_code() == 0


@pytest.mark.system
async def test_a_worker_with_too_much_memory_is_replaced(fake: FakeTriton, tmp_path: Path) -> None:
    flag, is_ready, is_told = tmp_path / "too much", tmp_path / "ready", tmp_path / "told"
    patch = (
        "import app.server, os, time; app.server._HANDOVER_SECONDS = 1.0\n"
        "from granian.server.mp import WorkerProcess; terminate = WorkerProcess.terminate\n"
        "def hand_over(worker):\n"
        f"    while not os.path.exists({str(is_ready)!r}): time.sleep(0.01)  # on a busy machine\n"
        f"    open({str(is_told)!r}, 'w').close()\n"
        "    terminate(worker)\n"
        "WorkerProcess.terminate = hand_over\n"
        "app.server.Server.rss_sample_interval = property(lambda _: 0.2, lambda *_: None)\n"
        f"app.server.Server.workers_rss = property(lambda _: 1 if os.path.exists({str(flag)!r}) else 2**50, lambda *_: None)"
    )
    async with running(fake, tmp_path, patch) as api:
        (first,) = api.workers()
        reader, writer = await asyncio.open_unix_connection(str(api.socket))
        head = f"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Type: image/bmp\r\nContent-Length: {len(SCENE)}\r\n\r\n"
        writer.write(head.encode() + SCENE[:100])
        await writer.drain()
        flag.touch()

        async def is_next_there() -> bool:
            assert await api.status("/livez") == 200
            return len(api.workers()) == 2

        await until(is_next_there)
        flag.unlink()

        async def are_both_ready() -> bool:
            return (await api.client.get("/health")).json()["workers"]["running"] == 2  # type: ignore[no-any-return]

        await until(are_both_ready)
        is_ready.touch()
        (second,) = set(api.workers()) - {first}

        async def is_only_next_there() -> bool:
            assert await api.status("/livez") == 200
            return api.workers() == [second]

        await eventually(is_told.exists)
        for _ in range(20):  # a connection that the first one has just accepted is closed, and a client repeats the request
            await until(partial(api.answers, "/livez", 200))
        writer.write(SCENE[100:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await until(is_only_next_there)
        writer.close()


def test_workers_of_several_instances_are_not_replaced_together() -> None:
    old = [Server(Settings(worker_max_age_seconds=10_000, worker_max_memory_mb=10_000)) for _ in range(20)]
    for values in ([server.workers_lifetime for server in old], [server.workers_rss / 2**20 for server in old]):
        assert 9000 <= min(values) < max(values) <= 11_000
    least = Server(Settings(worker_max_age_seconds=60, worker_max_memory_mb=1))
    assert least.workers_lifetime >= 60
    assert least.workers_rss == 2**20  # none would be no limit
