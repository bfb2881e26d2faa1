"""Clients that hold connections, bodies or answers, and a host that runs out of disk space, open files or memory."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import httpx
import pytest
from PIL import Image

from bench.harness.triton import Triton
from tests.api.conftest import write_keys
from tests.faults import models
from tests.faults.exchange import Case, Connection, ask, ask_all, encode
from tests.faults.meanwhile import every, meanwhile, until
from tests.faults.serving import WORKERS, Gateway, gateway_to, serving, unharmed
from tests.imaging.samples import encode as encode_image
from tests.nginx import proxying
from tests.processes import PATIENCE_SECONDS
from tests.support import Samples, read_samples, sample_image, scrape

_CAT = sample_image("chelsea.jpg")
_PHOTO = encode(_CAT)
_LIVEZ = encode(b"", "/livez", "GET")
_FORM = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n%b\r\n--x--\r\n'
_HEAD = b"POST /detect HTTP/1.1\r\nHost: nereid\r\n"
_JSON = b"POST /infer/object_detection HTTP/1.1\r\nHost: nereid\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"

NEEDS_MOUNTS = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0,
    reason="mounting a small disk for a process needs root or CAP_SYS_ADMIN",
)


def on_a_full_disk(folder: Path, log: Path | None = None) -> Sequence[str]:
    """Return a command that runs another one with a full disk at a folder, which no other process sees."""
    log = log or folder.parent / "dd.log"
    mount = f"mount -t tmpfs -o size=1m tmpfs {folder} && ! dd if=/dev/zero of={folder}/full bs=64k status=none 2>{log}"
    return ["unshare", "--mount", "sh", "-c", f'{mount}; exec "$@"', "sh"]


@pytest.mark.system
@NEEDS_MOUNTS
async def test_full_disk_for_temporary_files_is_not_noticed(null_triton: Triton, tmp_path: Path) -> None:
    (full := tmp_path / "full").mkdir()
    image = _CAT + bytes(5_000_000)
    with serving(null_triton, tmp_path, wrapper=["env", f"TMPDIR={full}", *on_a_full_disk(full)]) as gateway, unharmed(gateway):
        raw = await ask(gateway.url, encode(image))
        form = await ask(gateway.url, encode(_FORM % image, Content_Type="multipart/form-data; boundary=x"))

    assert (raw.status, form.status) == (200, 200)


@pytest.mark.system
async def test_reader_of_the_log_that_stalls_stops_no_detection(null_triton: Triton, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with serving(null_triton, tmp_path, wrapper=["sh", "-c", f'exec "$@" >{pipe} 2>&1', "sh"]) as gateway:
        pids = gateway.pids()
        answers = await ask_all(gateway.url, [Case("", _PHOTO)] * 1000)
        assert {answer.status for _, answer in answers} == {200}
        assert gateway.pids() == pids
        lines = 0
        while lines < 1000:  # all of them fit
            with suppress(BlockingIOError):
                lines += os.read(reader, 1 << 16).count(b'"event":"request"')
    os.close(reader)


async def test_limit_of_open_files_only_keeps_new_clients_waiting(null_triton: Triton, tmp_path: Path) -> None:
    """The workers do not spin, serve who is connected, and recover."""
    with serving(null_triton, tmp_path, wrapper=["prlimit", "--nofile=120:120"]) as gateway:
        pids = gateway.pids()
        async with AsyncExitStack() as stack:
            connected = [await stack.enter_async_context(await Connection.open(gateway.url)) for _ in range(4)]
            assert {(await connection.ask(_LIVEZ)).status for connection in connected} == {200}
            idle = [await Connection.open(gateway.url) for _ in range(300)]
            await asyncio.sleep(1)
            used = gateway.cpu_seconds()
            await asyncio.sleep(4)
            assert gateway.cpu_seconds() - used < 2
            assert {(await connection.ask(_PHOTO)).status for connection in connected} == {200}
            for connection in idle:
                connection.abort()
            assert (await ask(gateway.url, _PHOTO)).status == 200
        assert gateway.pids() == pids


async def test_images_beyond_the_memory_are_rejected(null_triton: Triton, tmp_path: Path) -> None:
    """Of 200 large images at once as many are decoded as fit, and the others get 429."""
    large = Image.new("RGB", (5_000, 5_000), "teal")
    images = [encode_image(large, "PNG"), encode_image(large, "JPEG", progressive=True), encode_image(large, "WEBP")]
    limits = {"max_megapixels": 25, "max_megapixels_non_jpeg": 25, "max_file_size_mb": 10}
    samples: list[int] = []
    with serving(null_triton, tmp_path, settings={"memory_mb": 1, "timeout_seconds": 20, **limits}) as gateway:
        await ask_all(gateway.url, [Case("", _PHOTO)] * 200)
        page = (await ask(gateway.url, encode(b"", "/metrics", "GET"))).body.decode()
        name = 'api_reserved_bytes_limit{purpose="images"}'
        (budget,) = (float(line.split()[1]) for line in page.splitlines() if line.startswith(name))
        before = gateway.rss()
        with unharmed(gateway, growth_mb=50, allowed={504}):
            async with meanwhile(every(0.05, lambda: samples.append(gateway.rss()))):
                answers = await ask_all(gateway.url, [Case("", encode(images[n % 3])) for n in range(200)], clients=200)
        assert (await ask(gateway.url, _PHOTO)).status == 200

    assert max(samples) - before <= budget
    assert {200, 429} <= {answer.status for _, answer in answers} <= {200, 429, 504}
    assert all("retry-after" in answer.headers for _, answer in answers if answer.status == 429)


@pytest.mark.system
@pytest.mark.parametrize("leaves", [True, False])
async def test_streams_that_are_abandoned_or_not_read_hold_nothing(gateway: Gateway, *, leaves: bool) -> None:
    in_use = "api_model_active_requests", "api_slots_in_use", "api_decode_queue_length", 'api_reserved_bytes{purpose="images"}'
    model = "wait_20" if leaves else "null"
    made = httpx.Request("POST", "http://127.0.0.1", files=[("images", _CAT)] * 64)
    path, form = f"/detect/batch?confidence=0&model={model}", made.headers["content-type"]
    request = encode(made.read(), path, Content_Type=form, Accept="application/x-ndjson")

    def used(samples: Samples) -> float:
        return sum(value for name, value in samples.items() if name.startswith(in_use))

    connections = [await Connection.open(gateway.url) for _ in range(10)]
    with unharmed(gateway, growth_mb=100):  # the first images touch the workers' arenas, 39 MiB each
        async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_SECONDS) as client:
            for connection in connections:
                connection.stop_reading()
                await connection.send(request)
            while leaves and not used(await scrape(client)):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
            for connection in connections if leaves else ():
                connection.abort()
            while used(await scrape(client)) or (await ask(gateway.url, _PHOTO)).status != 200:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)
    for connection in connections:
        connection.abort()


class SlowClient(NamedTuple):
    at_once: bytes
    every_second: bytes = b""
    reads: bool = True
    """Whether it takes the answer."""


# The first header may take 10 s; a body may pause for 10 s and take 30 s.
_ALSO_AT_NGINX = [
    SlowClient(b""),
    SlowClient(_HEAD),
    SlowClient(_HEAD, b"X"),
    SlowClient(_HEAD + b"Content-Length: 100000\r\n\r\n" + bytes(50_000)),
]
KINDS = [
    *_ALSO_AT_NGINX,
    SlowClient(_HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
    SlowClient(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
]
UNREAD = SlowClient(b"GET /docs-assets/swagger_bundle.js HTTP/1.1\r\nHost: nereid\r\n\r\n" * 64, b"\r\n", reads=False)


async def hold(url: str, client: SlowClient) -> None:
    """Keep a connection open for as long as the server lets us."""
    async with await Connection.open(url) as connection:
        if not client.reads:
            connection.stop_reading()
        connection.writer.write(client.at_once)
        closed = asyncio.ensure_future(connection.wait_closed() if client.reads else asyncio.sleep(PATIENCE_SECONDS))
        try:
            while not closed.done() and not connection.writer.is_closing():
                await asyncio.wait([closed], timeout=1)
                connection.writer.write(client.every_second)
        finally:
            closed.cancel()


@asynccontextmanager
async def besieged(url: str, clients: Sequence[SlowClient]) -> AsyncIterator[None]:
    """Keep slow clients busy during a block: each connects again when its connection is closed."""

    async def insist(client: SlowClient, delay: float) -> None:
        await asyncio.sleep(delay)
        while True:
            with suppress(ConnectionError):
                await hold(url, client)

    random = Random(4603)  # noqa: S311 - so that not all of them send at the same time
    async with meanwhile(*(insist(client, random.uniform(0, 3)) for client in clients)):
        await asyncio.sleep(4)
        yield


async def test_slow_client_is_cut_off(gateway: Gateway, tmp_path: Path) -> None:
    """NGINX does so itself, but for a body that never pauses for long: that costs it a connection, and the gateway nothing."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        with proxying([gateway.address], tmp_path) as proxy:
            lines = len(gateway.log_lines())
            await asyncio.gather(*(hold(proxy.local_url, client) for client in _ALSO_AT_NGINX))
            assert not [line for line in gateway.log_lines()[lines:] if line.get("route") == "/detect"]
            await hold(proxy.local_url, UNREAD)
        lines = len(gateway.log_lines())
        await asyncio.gather(*(hold(gateway.url, client) for client in KINDS))
    await until(lambda: [line["status"] for line in gateway.log_lines()[lines:]].count(408) == 3)


async def test_connections_without_a_request_leave_their_places_to_others(null_triton: Triton, tmp_path: Path) -> None:
    """They take all places of both workers. Connections that have had a request keep theirs."""
    limits = ["prlimit", "--nofile=2564:2564"]
    with serving(null_triton, tmp_path, wrapper=limits, settings={"keep_alive_seconds": 3600}) as gateway:
        async with await Connection.open(gateway.url) as idle:
            assert (await idle.ask(_LIVEZ)).status == 200
            silent = [await Connection.open(gateway.url) for _ in range(5_000)]
            await asyncio.gather(*(connection.send(_HEAD) for connection in silent[::2]))
            assert (await ask(gateway.url, _PHOTO)).status == 200
            await asyncio.gather(*(connection.wait_closed() for connection in silent))
            assert (await idle.ask(_PHOTO)).status == 200
        for connection in silent:
            connection.abort()


async def test_callers_with_a_key_are_served_while_others_hold_connections_and_bodies(null_triton: Triton, tmp_path: Path) -> None:
    """A route takes keys in the body: who sends none holds nothing of those that have one in a header, and leaves nothing."""
    keys = write_keys(tmp_path, ("camera", "not-a-secret", "detect"))
    silent = SlowClient(_JSON % 1000 + b"{")
    large = SlowClient(_JSON % (46 * 2**20) + b'{"image": "' + bytes(8 * 2**20), bytes(2**20))
    request = encode(_CAT, Content_Type="image/jpeg", X_API_Key="camera.not-a-secret")
    with serving(null_triton, tmp_path, settings={"api_keys_file": keys, "timeout_seconds": 20}) as gateway:
        await until(lambda: [line["event"] for line in gateway.log_lines()].count("a Triton is used") == WORKERS)
        await ask_all(gateway.url, [Case("", request)] * 50)
        fds = gateway.fds()
        with unharmed(gateway, growth_mb=100):
            async with besieged(gateway.url, [*[silent] * 700, *KINDS * 50, *[large] * 19]):
                answers = [answer for _, answer in await ask_all(gateway.url, [Case("", request)] * 400, clients=4)]
            await until(lambda: gateway.fds() <= fds + 8)  # connections that others keep open
        others = {line["status"] for line in gateway.log_lines() if line.get("route") == "/roboflow/infer/object_detection"}

    assert {answer.status for answer in answers} == {200}
    assert {429} <= others <= {408, 429, 499}


@pytest.mark.system
async def test_newer_frame_takes_the_place_of_one_that_waits(triton: Triton, tmp_path: Path) -> None:
    """A single request and other frames fill two batches. Connections are not kept, so any worker may get the next frame."""
    client = httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_keepalive_connections=0))
    with gateway_to(triton, tmp_path, model="faulty", timeout_seconds=PATIENCE_SECONDS) as gateway, unharmed(gateway):
        async with client:
            client.base_url = httpx.URL(gateway.url)

            def send(stream: str, path: str = "/detect", **content: Any) -> asyncio.Task[httpx.Response]:  # noqa: ANN401
                return asyncio.create_task(client.post(path, headers={"X-Stream": stream}, **(content or {"content": _CAT})))

            def are(waiting: int, active: int = 16) -> bool:
                found = read_samples(httpx.get(f"{gateway.url}/metrics").text)
                counts = [found.get(f'api_model_{kind}_requests{{model="faulty"}}', 0) for kind in ("waiting", "active")]
                return counts == [waiting, active]

            assert (await send("a name")).json()["code"] == "invalid_parameter"
            assert (await send("a name", "/ingest")).json()["code"] != "invalid_parameter"  # ignores the header
            async with models.faulty(triton.repository, "hang"):
                single = send("")  # no stream
                await until(lambda: are(0, 1))
                others = [send(f"{number}") for number in range(15)]
                await until(lambda: are(0))
                left, yard, newest = send("gate"), send("yard"), send("door")
                await until(lambda: are(3))
                left.cancel()
                for path, content in [("/detect", {}), ("/v1/vision/detection", {"files": {"image": _CAT}})] * 2:
                    await until(lambda: are(2))
                    older, newest = newest, send("door", path, **content)
                    assert (await older).status_code == 409
            assert {(await answer).status_code for answer in (single, *others, yard, newest)} == {200}
            await until(lambda: are(0, 0))
            found = await scrape(client)
            assert (found['api_errors_total{code="superseded"}'], found['api_reserved_bytes{purpose="images"}']) == (4, 0)
            assert found['api_inference_batch_size_count{model="faulty"}'] < found['api_inference_batch_size_sum{model="faulty"}']
