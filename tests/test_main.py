"""Composition: what an application owns while it runs, and that nothing of it is left afterwards."""

import asyncio
import gc
import threading
from itertools import chain, repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from PIL import Image

from app import main
from app.host import memory
from app.host.processes import SEARCH_SOCKET
from app.main import create_app, open_resources
from app.pipeline import preprocess
from app.pipeline.decode_threads import DecodeThreads
from app.resilience.fairness import ANYBODY
from app.settings.schema import Settings
from app.triton.shared_memory import SHM
from tests.fakes.triton import FakeTriton, serving
from tests.imaging.samples import encode
from tests.support import SCENE, eventually, json, started
from tests.world import Gate

pytestmark = pytest.mark.usefixtures("restored_logging")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(model="tiny", model_repository=str(tmp_path), transport="inline", log_level="error")


def with_triton(settings: Settings, port: int) -> Settings:
    return msgspec.structs.replace(settings, triton_endpoints=f"127.0.0.1:{port}")


def arenas() -> set[str]:
    return {path.name for path in SHM.glob("nereid-*")}


async def test_worker_is_prepared_for_its_first_request_and_leaves_no_memory(settings: Settings) -> None:
    fake, before = FakeTriton(), arenas()
    async with serving(fake) as port:
        application = create_app(msgspec.structs.replace(with_triton(settings, port), transport="auto"))
        assert any(thing is application for thing in gc.get_objects())
        async with started(application):
            assert fake.config_reads == 1
            assert [request.id for request in fake.requests] == ["warm-up"]
            assert not any(thing is application for thing in gc.get_objects())
            created = {key.removeprefix("/") for key in fake.keys.values()}
            assert len(created) == len(fake.regions) == 1
            assert created <= arenas() - before
        assert not fake.regions
        assert not created & arenas()


async def test_leftovers_of_killed_workers_are_removed(settings: Settings) -> None:
    """Triton unmaps them for the first worker with shared memory, but not what is in use, nor what others have registered."""
    (leftover := SHM / "nereid-4194304-0123abcd").touch()  # the process id is larger than the kernel allows
    fake = FakeTriton()
    fake.keys = {"stale": f"/{leftover.name}", "of others": "/theirs", "without a slash": "theirs"}
    fake.regions = set(fake.keys)
    async with serving(fake) as port:
        in_memory = msgspec.structs.replace(with_triton(settings, port), transport="auto")
        async with started(create_app(with_triton(settings, port))):  # its transport is `inline`
            assert not leftover.exists()
            assert fake.regions == {"stale", "of others", "without a slash"}
        async with started(create_app(in_memory)):
            living = fake.regions.copy()
            assert len(living) == 3
            assert living > {"of others", "without a slash"}
            assert "stale" not in living
            async with started(create_app(in_memory)):
                assert fake.regions > living


async def test_no_task_or_thread_runs_once_the_application_has_ended(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SEARCH_SOCKET, str(tmp_path / "nobody-listens"))
    with_search = msgspec.structs.replace(settings, search="on", database_url="postgresql://localhost/nereid")
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    async with serving(FakeTriton()) as port:
        async with started(create_app(with_triton(with_search, port))) as client:
            # An image that is rejected by the decoder, so that the pool has started a thread.
            assert (await client.post("/detect", content=b"\x89PNG\r\n\x1a\n")).status_code == 422
            assert asyncio.all_tasks() - tasks
        # Gateways of other tests also start tasks, which end.
        await eventually(lambda: not [task for task in asyncio.all_tasks() - tasks if "grpc" not in repr(task)])

    lasting = "grpc", "_poll_wrapper", "asyncio_"  # of gRPC and of the event loop, if no test has needed them before
    assert not [thread for thread in set(threading.enumerate()) - threads if not any(name in repr(thread) for name in lasting)]


async def settle() -> None:
    """Let everything happen that waits for nothing from outside of the event loop."""
    for _ in range(100):
        await asyncio.sleep(0)


@pytest.mark.parametrize("how", ["decoding", "inference"])
async def test_work_that_outlives_its_request_ends_before_the_application(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    fake, gate = FakeTriton(), Gate()
    close = DecodeThreads.close

    def open_and_close(threads: DecodeThreads) -> None:
        gate.opened.set()
        close(threads)

    async def answer() -> None:
        await settle()
        fake.may_answer.set()

    monkeypatch.setattr(DecodeThreads, "close", open_and_close)  # the end of the application has come so far
    async with serving(fake) as port, started(create_app(with_triton(settings, port))) as client:
        if how == "decoding":
            gate.block(monkeypatch, preprocess, "fill_input")
        else:
            fake.may_answer.clear()
        assert (await client.post("/detect?timeout_ms=300", content=SCENE)).status_code == 504
        answering = asyncio.create_task(answer())
    await answering
    await settle()
    gc.collect()
    asyncio.get_running_loop().set_exception_handler(None)

    # gRPC's poller, which all event loops of a process share, complains of loops that earlier tests have closed.
    assert [report for report in reports if "PollerCompletionQueue" not in str(report)] == []


@pytest.mark.parametrize(("image_format", "side"), [("PNG", 1000), ("AVIF", 707)])
async def test_memory_suffices_for_the_largest_image(settings: Settings, image_format: str, side: int) -> None:
    """This holds however little memory the settings give to all requests; an AVIF is rewritten for its decoder."""
    little = msgspec.structs.replace(settings, memory_mb=1, max_file_size_mb=1, max_batch_size_mb=1, max_megapixels=1)
    image = encode(Image.new("RGB", (side, side)), image_format)
    async with serving(FakeTriton().find_nothing()) as port, started(create_app(with_triton(little, port))) as client:
        assert (await client.post("/detect", content=image + bytes(1_000_000))).status_code == 200


async def test_images_that_little_memory_has_no_room_for_are_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 400 * 2**20)
    one = msgspec.structs.replace(settings, workers=1)
    async with serving(FakeTriton().find_nothing()) as port, started(create_app(with_triton(one, port))) as client:
        limit = json(await client.get("/health"))["limits"]["max_megapixels"]
        small, large = [encode(Image.new("RGB", (side, 1000)), "JPEG") for side in (int(limit * 999), int(limit * 1001))]
        assert [(await client.post("/detect", content=image)).status_code for image in (small, large)] == [200, 413]
    assert 5 < limit < 12


async def test_housekeeping_goes_on_after_an_error_and_returns_the_memory_of_a_burst(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    returned, refresh = Mock(), Mock(side_effect=chain([OSError("no file descriptor left")], repeat(None)))
    resident = 100
    monkeypatch.setattr("app.host.allocator.return_freed_memory", returned)
    monkeypatch.setattr("app.host.memory.resident_bytes", lambda: resident)
    monkeypatch.setattr(main, "_HOUSEKEEPING_SECONDS", 0.01)
    async with serving(FakeTriton()) as port, open_resources(with_triton(settings, port)) as (_, opened, _):
        monkeypatch.setattr(opened.admission, "refresh", refresh)

        async def some_rounds() -> None:
            refresh.reset_mock()
            await eventually(lambda: refresh.call_count > 2)

        with opened.admission.memory.reserve(ANYBODY) as reserved:
            reserved.add(64 * 2**20)
            await asyncio.sleep(0)  # the usual size is noted
            resident = 200
            await some_rounds()
            returned.assert_not_called()
        await eventually(lambda: returned.called)
        await some_rounds()

    returned.assert_called_once_with()
