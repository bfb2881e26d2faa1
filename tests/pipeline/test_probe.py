"""The probe, with a fake and with a real Triton."""

import asyncio
import struct
from io import BytesIO
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app.embedded.server import EmbeddedTriton
from app.errors import DeadlinePassed, GatewayError, TritonUnavailable
from app.model.spec import from_triton_config
from app.pipeline import probe
from app.pipeline.probe import run_probe
from app.settings.schema import Settings
from app.triton import client as client_module
from app.triton.client import TritonClient
from app.triton.status import Disconnected, Draining, Unreachable
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, infer_response, serving, serving_bytes
from tests.support import NEEDS_BYTES, eventually, free_port

Fake = tuple[FakeTriton, TritonClient]


def config_with(data_type: str, dims: list[int], **others: Any) -> dict[str, Any]:  # noqa: ANN401
    return {**CONFIG, "input": [{"name": "image", "data_type": data_type, "dims": dims}], **others}


@pytest.mark.parametrize(
    ("config", "shape", "nbytes"),
    [
        (CONFIG, [32, 32, 3], 32 * 32 * 3),
        (config_with("TYPE_FP32", [3, 32, 64]), [3, 32, 64], 4 * 3 * 32 * 64),
        (config_with("TYPE_FP16", [3, 32, 64], max_batch_size=8), [1, 3, 32, 64], 2 * 3 * 32 * 64),
    ],
)
async def test_a_model_of_tensors_gets_a_black_image(
    fake_triton: Fake, config: dict[str, Any], shape: list[int], nbytes: int
) -> None:
    """It is sent inline, because Triton may not have mapped an arena yet."""
    fake, client = fake_triton
    await run_probe(client, from_triton_config(config, "1"))

    (request,) = fake.requests
    assert (request.id, request.model_name) == ("probe", "tiny")
    assert list(request.inputs[0].shape) == shape
    assert not request.inputs[0].parameters
    assert list(request.raw_input_contents) == [bytes(nbytes)]
    assert request.parameters["timeout"].int64_param == 5_000_000


async def test_a_model_of_files_gets_a_file(fake_triton: Fake) -> None:
    fake, client = fake_triton
    config = config_with("TYPE_STRING", [1], parameters={"square": {"string_value": "32"}})
    spec = from_triton_config(config, "1")
    assert spec.dtype is None
    await run_probe(client, spec)

    (request,) = fake.requests
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("BYTES", [1])
    (content,) = request.raw_input_contents
    (length,) = struct.unpack("<I", content[:4])
    assert length == len(content) - 4
    with Image.open(BytesIO(content[4:])) as image:
        image.load()
        assert (image.format, image.size) == ("PNG", (1, 1))


@pytest.mark.parametrize(
    "refusal",
    [
        (grpc.StatusCode.INTERNAL, "onnx runtime error 1"),
        (grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input 'image'"),
        (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"),
    ],
)
async def test_a_refusal_of_the_model_is_an_answer(fake_triton: Fake, refusal: tuple[grpc.StatusCode, str]) -> None:
    """Triton works, and requests should get the same error from it instead of `CircuitOpen`."""
    fake, client = fake_triton
    fake.refusal = refusal
    can_run = await run_probe(client, SPEC)

    assert can_run is (refusal[0] is not grpc.StatusCode.INTERNAL)
    assert len(fake.requests) == 1


async def test_a_probe_that_is_lost_is_given_up(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up even if Triton does not survive a cancel, so that another probe can follow."""
    monkeypatch.setattr(client_module, "_BACKSTOP_SECONDS", 0.1)
    monkeypatch.setattr(probe, "_QUEUE_SECONDS", 0.1)
    fake, client = fake_triton
    fake.may_answer.clear()
    with pytest.raises(DeadlinePassed):
        await run_probe(client, SPEC)

    assert fake.cancelled == 0
    fake.may_answer.set()
    assert await run_probe(client, SPEC)


async def test_an_answer_that_makes_no_sense_is_one(fake_triton: Fake) -> None:
    fake, client = fake_triton
    fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    fake.answer.raw_output_contents[0] = b""
    assert await run_probe(client, SPEC)
    async with serving_bytes(b"\xff\xff\xff") as url:
        garbled = TritonClient(url)
        assert await run_probe(garbled, SPEC)
        await garbled.close()

    assert len(fake.requests) == 1


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        ((grpc.StatusCode.UNAVAILABLE, "Server is stopping"), Draining),
        ((grpc.StatusCode.UNAVAILABLE, "failed to connect"), Unreachable),
        ((grpc.StatusCode.UNAVAILABLE, "Socket closed"), Disconnected),
        ((grpc.StatusCode.UNAVAILABLE, "Request timeout expired"), DeadlinePassed),
        ((grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."), TritonUnavailable),
        ((grpc.StatusCode.CANCELLED, ""), TritonUnavailable),
    ],
)
async def test_a_triton_that_does_not_run_the_model_fails_the_probe(
    fake_triton: Fake, refusal: tuple[grpc.StatusCode, str], expected: type[GatewayError]
) -> None:
    fake, client = fake_triton
    fake.refusal = refusal
    with pytest.raises(expected):
        await run_probe(client, SPEC)

    assert len(fake.requests) == 1


async def test_a_probe_waits_until_triton_can_be_reached() -> None:
    fake, port = FakeTriton(), free_port()
    client = TritonClient(f"127.0.0.1:{port}")
    probing = asyncio.create_task(run_probe(client, SPEC))
    with pytest.raises(TritonUnavailable):
        await client.read_server()
    assert not probing.done()
    async with serving(fake, port):
        await probing

        assert [request.id for request in fake.requests] == ["probe"]
        await client.close()


async def test_a_probe_asks_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection on which nothing is sent would not be noticed."""
    monkeypatch.setattr(probe, "_ASK_SECONDS", 0.02)
    asked: list[str] = []

    class AskedTriton(FakeTriton):
        async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
            asked.append(request.name)
            return await super().ModelReady(request, context)

    fake = AskedTriton()
    async with serving(fake):
        client = TritonClient(fake.url)
        fake.may_answer.clear()
        fake.is_model_ready = False
        probing = asyncio.create_task(run_probe(client, SPEC))
        await eventually(lambda: len(asked) > 2)
        assert not probing.done()
        fake.may_answer.set()
        await probing
        await client.close()

    assert set(asked) == {"tiny"}
    assert len(fake.requests) == 1


async def test_giving_up_a_probe_ends_its_call(fake_triton: Fake) -> None:
    """The call to an old Triton, which may crash then, would continue."""
    fake, client = fake_triton
    fake.version = "2.59.1"
    await eventually(lambda: client.survives_cancel)
    fake.may_answer.clear()
    probing = asyncio.create_task(run_probe(client, SPEC))
    await eventually(lambda: bool(fake.requests))
    probing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probing

    await eventually(lambda: fake.running == 0)


def answers_of(settings: Settings, model: str) -> tuple[int, int]:
    """Ask a real Triton how many inferences of a model succeeded and failed."""
    with grpc.insecure_channel(settings.triton_address) as channel:
        request = service_pb2.ModelStatisticsRequest(name=model)
        (stats,) = GRPCInferenceServiceStub(channel).ModelStatistics(request).model_stats
    return stats.inference_stats.success.count, stats.inference_stats.fail.count


@pytest.mark.parametrize(
    ("model", "succeeds"), [("six_columns", True), ("half_four_tensors", True), pytest.param("file_in", False, marks=NEEDS_BYTES)]
)
async def test_a_real_model_runs_the_probe(
    settings: Settings,
    triton: EmbeddedTriton,
    model: str,
    succeeds: bool,  # noqa: FBT001
) -> None:
    """The model that takes files only reads BMP, so it fails, but it is run."""
    assert triton.poll() is None
    client = TritonClient(settings.triton_address)
    spec = from_triton_config(*await client.read_config(model))
    succeeded, failed = answers_of(settings, model)
    assert await run_probe(client, spec) is succeeds
    await client.close()

    # Triton counts an inference after it has answered it.
    await eventually(lambda: answers_of(settings, model) == (succeeded + succeeds, failed + (not succeeds)))
