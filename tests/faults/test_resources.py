"""A host that runs out of something: disk space, open files, memory."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import pytest
from PIL import Image

from bench.harness.triton import Triton
from tests.fakes.models import scene
from tests.faults import corpus
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Answer, Case, Connection, ask, ask_all, encode
from tests.faults.meanwhile import every, meanwhile
from tests.faults.serving import Gateway, serving, unharmed
from tests.imaging.samples import encode as encode_image

_IMAGE = scene("JPEG")
_MEMORY_LIMIT = 'api_reserved_bytes_limit{purpose="images"}'
_LIVEZ = encode(b"", "/livez", "GET")
_FORM = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n%b\r\n--x--\r\n'
_MAX_FILES = 120
_IDLE = 300

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
@pytest.mark.parametrize("size", [1_000, 5_000_000])
async def test_a_full_disk_for_temporary_files(null_triton: Triton, tmp_path: Path, size: int) -> None:
    """Row 39: images and forms of any size are answered as ever, because no body is written to a disk."""
    full = tmp_path / "full"
    full.mkdir()
    image = _IMAGE + bytes(size)
    with serving(null_triton, tmp_path, wrapper=["env", f"TMPDIR={full}", *on_a_full_disk(full)]) as gateway, unharmed(gateway):
        raw = await ask(gateway.url, encode(image))
        form = await ask(gateway.url, encode(_FORM % image, Content_Type="multipart/form-data; boundary=x"))

    assert (raw.status, form.status) == (200, 200)


async def test_no_open_files_are_left(null_triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Row 40: at the limit of open files the workers do not spin, serve who is connected, and recover within 2 s."""
    with serving(null_triton, tmp_path, wrapper=["prlimit", f"--nofile={_MAX_FILES}:{_MAX_FILES}"]) as gateway:
        pids = gateway.pids()
        async with AsyncExitStack() as stack:
            connected = [await stack.enter_async_context(await Connection.open(gateway.url)) for _ in range(4)]
            assert {(await connection.ask(_LIVEZ)).status for connection in connected} == {200}
            idle = [await Connection.open(gateway.url) for _ in range(_IDLE)]
            await asyncio.sleep(1)
            used = gateway.cpu_seconds()
            await asyncio.sleep(4)
            share = (gateway.cpu_seconds() - used) / 4
            statuses = {(await connection.ask(encode(_IMAGE))).status for connection in connected}
            for connection in idle:
                connection.abort()
            started = monotonic()
            async with asyncio.timeout(10):
                answer = await ask(gateway.url, encode(_IMAGE))
            seconds = monotonic() - started

        record_figure(f"limit of open files, {_IDLE} idle connections: share of a core in use", share, 0.5)
        record_figure("limit of open files: next new client answered after, s", seconds, 2)
        assert statuses == {200}
        assert answer.status == 200
        assert gateway.pids() == pids


async def test_more_images_than_memory(null_triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Row 41: of 200 large images at once as many are decoded as fit into the memory, and the others are rejected with 429."""
    large = Image.new("RGB", (5_000, 5_000), "teal")
    images = [encode_image(large, "PNG"), encode_image(large, "JPEG", progressive=True), encode_image(large, "WEBP")]
    settings = {
        "memory_mb": 1,
        "max_megapixels": 25,
        "max_megapixels_non_jpeg": 25,
        "max_file_size_mb": 10,
        "timeout_seconds": 20,
    }
    samples: list[int] = []
    with serving(null_triton, tmp_path, settings=settings) as gateway:
        await ask_all(gateway.url, [Case("", encode(_IMAGE))] * 200)
        page = (await ask(gateway.url, encode(b"", "/metrics", "GET"))).body.decode()
        (budget,) = (float(line.split()[1]) for line in page.splitlines() if line.startswith(_MEMORY_LIMIT))
        before = gateway.rss()
        with unharmed(gateway, growth_mb=50):
            async with meanwhile(every(0.05, lambda: samples.append(gateway.rss()))):
                answers = await ask_all(gateway.url, [Case("", encode(images[n % 3])) for n in range(200)], clients=200)
        assert (await ask(gateway.url, encode(_IMAGE))).status == 200

    statuses = Counter(answer.status for _, answer in answers)
    record_figure(
        "200 images of 25 megapixels at once: memory growth at the peak, MiB", (max(samples) - before) / 2**20, budget / 2**20
    )
    assert set(statuses) == {200, 429}
    assert all("retry-after" in answer.headers for _, answer in answers if answer.status == 429)


async def test_64_bombs_at_once(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Rows 26 and 41: 64 images at the limit of pixels and 64 above it do not keep the gateway from answering others."""
    largest = encode(encode_image(Image.new("RGB", (5_000, 5_000)), "PNG"))
    cases = [Case("largest", largest)] * 64
    above = [Case("above", encode(data)) for data in corpus.bombs().values()] * 10
    others: list[Answer] = []

    async def live() -> None:
        while True:
            others.append(await ask(gateway.url, _LIVEZ))
            await asyncio.sleep(0.05)

    with unharmed(gateway, growth_mb=50):
        async with meanwhile(live()):
            answers = await ask_all(gateway.url, [*cases, *above[:64]], clients=128)

    statuses = {label: Counter(answer.status for name, answer in answers if name == label) for label in ("largest", "above")}
    slowest = max(answer.seconds for answer in others)
    record_figure("64 bombs at once: slowest /livez meanwhile, s", slowest, 1)
    assert set(statuses["largest"]) == {200, 429}
    assert set(statuses["above"]) <= {413, 429}
    assert {answer.status for answer in others} == {200}
