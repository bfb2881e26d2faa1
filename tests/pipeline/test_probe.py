"""The probe, with a fake and with a real Triton."""

import asyncio
import struct
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.errors import DeadlinePassed, GatewayError, TritonUnavailable
from app.model.spec import from_triton_config
from app.pipeline import probe
from app.pipeline.probe import run_probe
from app.triton import client as client_module
from app.triton.client import TritonClient
from app.triton.status import Disconnected, Draining
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, infer_response, serving
from tests.pipeline import refusals
from tests.pipeline.refusals import Refusal
from tests.support import eventually, free_port

Fake = tuple[FakeTriton, TritonClient]


@pytest.mark.parametrize(
    ("data_type", "dims", "batch", "shape", "nbytes"),
    [
        ("TYPE_UINT8", [32, 32, 3], 0, [32, 32, 3], 32 * 32 * 3),
        ("TYPE_FP16", [3, 32, 64], 8, [1, 3, 32, 64], 2 * 3 * 32 * 64),
    ],
)
async def test_model_of_tensors_gets_a_black_image_inline(  # noqa: PLR0913, PLR0917 - a table
    fake_triton: Fake, data_type: str, dims: list[int], batch: int, shape: list[int], nbytes: int
) -> None:
    """Triton may not have mapped an arena yet."""
    fake, client = fake_triton
    image = {"name": "image", "data_type": data_type, "dims": dims}
    await run_probe(client, from_triton_config({**CONFIG, "input": [image], "max_batch_size": batch}, "1"))

    (request,) = fake.requests
    assert (request.id, request.model_name) == ("probe", "tiny")
    assert list(request.inputs[0].shape) == shape
    assert not request.inputs[0].parameters
    assert list(request.raw_input_contents) == [bytes(nbytes)]
    assert request.parameters["timeout"].int64_param == 5_000_000


async def test_model_of_files_gets_a_file(fake_triton: Fake) -> None:
    fake, client = fake_triton
    image = {"name": "image", "data_type": "TYPE_STRING", "dims": [1]}
    config = {**CONFIG, "input": [image], "parameters": {"square": {"string_value": "32"}}}
    await run_probe(client, from_triton_config(config, "1"))

    (request,) = fake.requests
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("BYTES", [1])
    (content,) = request.raw_input_contents
    assert struct.unpack("<I", content[:4]) == (len(content) - 4,)
    with Image.open(BytesIO(content[4:])) as picture:
        picture.load()
        assert (picture.format, picture.size) == ("PNG", (1, 1))


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (refusals.FAILED, False),
        (refusals.MISSHAPEN, True),  # requests should get the same error instead of `CircuitOpen`
        (refusals.NOT_LOADED, True),
        (refusals.GONE, True),
        (None, True),  # an answer without sense
        (refusals.STOPPING, Draining),
        (refusals.BROKEN, Disconnected),
        (refusals.LATE, DeadlinePassed),
        (refusals.SICK, TritonUnavailable),
        (refusals.CANCELLED, TritonUnavailable),
    ],
)
async def test_probe_shows_whether_triton_can_run_the_model(
    fake_triton: Fake,
    refusal: Refusal | None,
    expected: bool | type[GatewayError],  # noqa: FBT001
) -> None:
    fake, client = fake_triton
    fake.refusal = refusal
    fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    fake.answer.raw_output_contents[0] = b""
    if isinstance(expected, bool):
        assert await run_probe(client, SPEC) is expected
    else:
        with pytest.raises(expected):
            await run_probe(client, SPEC)

    assert len(fake.requests) == 1


async def test_probe_that_is_lost_is_given_up(fake_triton: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_probe_waits_until_triton_can_be_reached_and_asks_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost connection on which nothing is sent would not be noticed."""
    monkeypatch.setattr(probe, "_ASK_SECONDS", 0.02)
    asked: list[str] = []

    class AskedTriton(FakeTriton):
        async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
            asked.append(request.name)
            return await super().ModelReady(request, context)

    fake, port = AskedTriton(), free_port()
    fake.may_answer.clear()
    fake.is_model_ready = False
    client = TritonClient(f"127.0.0.1:{port}")
    probing = asyncio.create_task(run_probe(client, SPEC))
    with pytest.raises(TritonUnavailable):
        await client.read_server()
    assert not probing.done()
    async with serving(fake, port):
        await eventually(lambda: len(asked) > 2)
        assert not probing.done()
        fake.may_answer.set()
        await probing
        await client.close()

    assert set(asked) == {"tiny"}
    assert [request.id for request in fake.requests] == ["probe"]


async def test_probe_that_is_cancelled_ends_its_call(fake_triton: Fake) -> None:
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
