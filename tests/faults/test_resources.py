"""A host that runs out of something: disk space, open files or memory."""

import asyncio
import subprocess
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import pytest
from PIL import Image

from bench.harness.triton import Triton
from tests.fakes.models import scene
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Case, Connection, ask, ask_all, encode
from tests.faults.meanwhile import every, meanwhile
from tests.faults.serving import serving, unharmed
from tests.imaging.samples import encode as encode_image

_IMAGE = scene("JPEG")
_MEMORY_LIMIT = 'api_reserved_bytes_limit{purpose="images"}'
_LIVEZ = encode(b"", "/livez", "GET")
_FORM = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a"\r\n\r\n%b\r\n--x--\r\n'

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
    image = _IMAGE + bytes(5_000_000)
    with serving(null_triton, tmp_path, wrapper=["env", f"TMPDIR={full}", *on_a_full_disk(full)]) as gateway, unharmed(gateway):
        raw = await ask(gateway.url, encode(image))
        form = await ask(gateway.url, encode(_FORM % image, Content_Type="multipart/form-data; boundary=x"))

    assert (raw.status, form.status) == (200, 200)


async def test_limit_of_open_files_only_keeps_new_clients_waiting(
    null_triton: Triton, tmp_path: Path, record_figure: RecordFigure
) -> None:
    """The workers do not spin, serve who is connected, and recover within 2 s."""
    with serving(null_triton, tmp_path, wrapper=["prlimit", "--nofile=120:120"]) as gateway:
        pids = gateway.pids()
        async with AsyncExitStack() as stack:
            connected = [await stack.enter_async_context(await Connection.open(gateway.url)) for _ in range(4)]
            assert {(await connection.ask(_LIVEZ)).status for connection in connected} == {200}
            idle = [await Connection.open(gateway.url) for _ in range(300)]
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

        record_figure("limit of open files, 300 idle connections: share of a core in use", share, 0.5)
        record_figure("limit of open files: next new client answered after, s", monotonic() - started, 2)
        assert statuses == {200}
        assert answer.status == 200
        assert gateway.pids() == pids


async def test_images_beyond_the_memory_are_rejected(null_triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Of 200 large images at once as many are decoded as fit, and the others get 429."""
    large = Image.new("RGB", (5_000, 5_000), "teal")
    images = [encode_image(large, "PNG"), encode_image(large, "JPEG", progressive=True), encode_image(large, "WEBP")]
    limits = {"max_megapixels": 25, "max_megapixels_non_jpeg": 25, "max_file_size_mb": 10}
    samples: list[int] = []
    with serving(null_triton, tmp_path, settings={"memory_mb": 1, "timeout_seconds": 20, **limits}) as gateway:
        await ask_all(gateway.url, [Case("", encode(_IMAGE))] * 200)
        page = (await ask(gateway.url, encode(b"", "/metrics", "GET"))).body.decode()
        (budget,) = (float(line.split()[1]) for line in page.splitlines() if line.startswith(_MEMORY_LIMIT))
        before = gateway.rss()
        with unharmed(gateway, growth_mb=50):
            async with meanwhile(every(0.05, lambda: samples.append(gateway.rss()))):
                answers = await ask_all(gateway.url, [Case("", encode(images[n % 3])) for n in range(200)], clients=200)
        assert (await ask(gateway.url, encode(_IMAGE))).status == 200

    record_figure("200 images of 25 megapixels: memory at the peak, MiB", (max(samples) - before) / 2**20, budget / 2**20)
    assert {answer.status for _, answer in answers} == {200, 429}
    assert all("retry-after" in answer.headers for _, answer in answers if answer.status == 429)
