"""Composition: what an application owns while it runs, and that nothing of it is left afterwards."""

import asyncio
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from PIL import Image

from app import main
from app.main import create_app, open_resources
from app.pipeline import preprocess
from app.pipeline.decode_threads import DecodeThreads
from app.resilience.fairness import ANYBODY
from app.settings.schema import Settings
from app.settings.task_models import default_models
from app.triton.shared_memory import SHM
from app.zoo import registry
from tests.fakes.otlp import receiving_traces
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.imaging.samples import GREY, encode, png
from tests.pipeline.gate import Gate
from tests.support import SCENE, captured_log, eventually, free_port, json, started


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Restore the session's logging configuration."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


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


async def test_application_starts_without_triton(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, main)
    nowhere = with_triton(settings, free_port())
    async with started(create_app(nowhere)) as client:
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/models")).status_code == 503

    ((level, _, fields),) = log
    assert (level, fields["model"], fields["triton"]) == ("warning", "tiny", nowhere.triton_address)
    assert fields["code"] == "triton_unavailable"


async def test_leftovers_of_killed_workers_are_removed(settings: Settings) -> None:
    (leftover := SHM / "nereid-4194304-0123abcd").touch()  # the process id is larger than the kernel allows
    fake = FakeTriton()
    fake.regions, fake.keys = {"stale"}, {"stale": f"/{leftover.name}"}
    async with serving(fake) as port:
        async with started(create_app(with_triton(settings, port))):  # its transport is `inline`
            assert not leftover.exists()
            assert fake.regions == {"stale"}
        async with started(create_app(msgspec.structs.replace(with_triton(settings, port), transport="auto"))):
            assert len(fake.regions) == 1
            assert "stale" not in fake.regions


async def test_no_task_or_thread_runs_once_the_application_has_ended(settings: Settings) -> None:
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    async with serving(FakeTriton()) as port:
        async with started(create_app(with_triton(settings, port))) as client:
            # An image that is rejected by the decoder, so that the pool has started a thread.
            assert (await client.post("/detect", content=b"\x89PNG\r\n\x1a\n")).status_code == 422
            assert asyncio.all_tasks() - tasks
        # A gateway of other tests may ask about the golden picture.
        await eventually(lambda: not [task for task in asyncio.all_tasks() - tasks if "Examiner._ask" in repr(task)])
        left = {task for task in asyncio.all_tasks() - tasks if "grpc" not in repr(task)}

    assert not left
    assert not {thread for thread in set(threading.enumerate()) - threads if "grpc" not in repr(thread)}


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
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    image = encode(Image.new("RGB", (side, side)), image_format)
    async with serving(fake) as port, started(create_app(with_triton(little, port))) as client:
        assert (await client.post("/detect", content=image + bytes(1_000_000))).status_code == 200


@pytest.mark.parametrize("budget", ["memory", "upload_memory"])
async def test_memory_of_a_burst_is_returned_when_it_has_ended(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, budget: str
) -> None:
    returned: list[bool] = []
    resident = 100
    monkeypatch.setattr("app.host.allocator.return_freed_memory", lambda: returned.append(True))
    monkeypatch.setattr("app.host.memory.resident_bytes", lambda: resident)
    monkeypatch.setattr(main, "_HOUSEKEEPING_SECONDS", 0.01)
    rounds: list[bool] = []
    async with serving(FakeTriton()) as port, open_resources(with_triton(settings, port)) as (_, opened, _):
        monkeypatch.setattr(opened.admission, "refresh", lambda: rounds.append(True))
        with getattr(opened.admission, budget).reserve(ANYBODY) as memory:
            memory.add(64 * 2**20)
            await asyncio.sleep(0)  # the usual size is noted
            resident = 200
            rounds.clear()
            await eventually(lambda: len(rounds) > 2)
            assert returned == []
        await eventually(lambda: returned == [True])
        rounds.clear()
        await eventually(lambda: len(rounds) > 2)

    assert returned == [True]


async def test_a_step_of_the_housekeeping_that_fails_does_not_stop_it(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, main)
    monkeypatch.setattr(main, "_HOUSEKEEPING_SECONDS", 0.01)
    async with serving(FakeTriton()) as port, open_resources(with_triton(settings, port)) as (_, opened, _):
        done: list[str] = []

        def refresh() -> None:
            done.append("refresh")
            if len(done) == 1:
                raise OSError("no file descriptor left")

        monkeypatch.setattr(opened.admission, "refresh", refresh)
        await eventually(lambda: len(done) > 1)

    assert [call.args for call in log][1:] == [("housekeeping failed",)]  # after that of the fake, which runs no model


async def test_traces_are_exported_before_the_application_ends(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What OpenTelemetry complains of is in the log."""
    threads = set(threading.enumerate())
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    async with serving(FakeTriton()) as port:
        traced = msgspec.structs.replace(with_triton(settings, port), tracing=True)
        with receiving_traces() as receiver:
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
            async with started(create_app(traced)) as client:
                response = await client.get("/livez")
                assert receiver.spans == []
            assert receiver.named("GET /livez").trace_id.hex() == response.headers["traceparent"].split("-")[1]
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
        async with started(create_app(traced)) as client:
            assert (await client.get("/livez")).status_code == 200
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("Otel")]
    out, err = capsys.readouterr()
    lines = [msgspec.json.decode(line) for line in out.splitlines()]
    assert [line["level"] for line in lines if line["event"].startswith("Failed to export spans batch")] == ["error"]
    assert err == ""


async def test_default_models_of_a_worker_are_those_of_the_settings(settings: Settings) -> None:
    """Which `remove` and `unload` refuse."""
    own = msgspec.structs.replace(settings, task_models="classification=kinds,pose=people")
    async with serving(FakeTriton()) as port, open_resources(with_triton(own, port)) as (_, opened, _):
        assert opened.default_models() == {*default_models(own).values()}


async def test_models_that_can_be_pulled_are_those_of_the_registry(settings: Settings) -> None:
    async with serving(FakeTriton()) as port:
        here = with_triton(settings, port)
        elsewhere = msgspec.structs.replace(here, model_repository=f"{here.model_repository}/nowhere")
        found = []
        for given in (here, elsewhere):
            async with started(create_app(given)) as client:
                models = json(await client.get("/models"))["models"]
                found.append({model["name"] for model in models if model["state"] == "not_pulled"})

    assert found == [registry.load().keys(), set()]


async def test_limits_are_those_of_the_settings(settings: Settings) -> None:
    limits = msgspec.structs.replace(settings, max_file_size_mb=0.001, max_megapixels=0.0001)
    image = png(20, 20, 8, GREY)
    async with serving(FakeTriton()) as port, started(create_app(with_triton(limits, port))) as client:
        large_body = await client.post("/detect", content=image + bytes(2000))
        large_image = await client.post("/detect", content=image)

    assert (large_body.status_code, large_body.json()["code"]) == (413, "body_too_large")
    assert (large_image.status_code, large_image.json()["code"]) == (413, "image_too_large")


async def test_settings_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Granian passes no settings, so each worker reads its own."""
    async with serving(FakeTriton()) as port:
        monkeypatch.setenv("NEREID_TRITON_ENDPOINTS", f"127.0.0.1:{port}")
        monkeypatch.setenv("NEREID_MODEL", "other")
        monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(tmp_path))
        monkeypatch.setenv("NEREID_TRANSPORT", "inline")
        async with started(create_app()) as client:
            assert json(await client.get("/models"))["default"] == "other"


def test_process_is_configured(settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called: list[int] = []
    monkeypatch.setattr("app.host.allocator.keep_freed_memory", lambda: called.append(1))
    create_app(msgspec.structs.replace(settings, log_level="warning"))
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")

    (line,) = capsys.readouterr().out.splitlines()
    assert msgspec.json.decode(line)["event"] == "loud"
    assert called == [1]
