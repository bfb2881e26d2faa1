"""The inference that checks Triton, against a server that answers like Triton."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from app.embedded.server import check_inference
from app.embedded.service import CheckError
from app.triton.blocking_client import BlockingClient
from tests.fakes.triton import CONFIG, FakeTriton, infer_response, serving
from tests.support import ROOT, free_port


@pytest.fixture
async def fake() -> AsyncIterator[FakeTriton]:
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((1, 2, 6), np.float32))
    async with serving(fake):
        yield fake
        fake.may_answer.set()


async def check(fake: FakeTriton, seconds: float = 10) -> None:
    await asyncio.to_thread(check_inference, BlockingClient(fake.url), "tiny", seconds)


def config_of(kind: str, dims: list[int], batch: int, **others: Any) -> dict[str, Any]:  # noqa: ANN401 - Triton's JSON
    return {**CONFIG, "max_batch_size": batch, "input": [{"name": "image", "data_type": f"TYPE_{kind}", "dims": dims}], **others}


@pytest.mark.parametrize("batch", [4, 0])
@pytest.mark.parametrize(
    ("kind", "sent_as", "dims", "content"),
    [
        ("UINT8", "UINT8", [32, 48, 3], bytes(32 * 48 * 3)),
        ("FP16", "FP16", [3, 32, 48], bytes(32 * 48 * 3 * 2)),
        ("STRING", "BYTES", [1], bytes(4)),
    ],
)
async def test_blank_image_or_empty_file_is_sent(  # noqa: PLR0913, PLR0917 - a table
    fake: FakeTriton, kind: str, sent_as: str, dims: list[int], content: bytes, batch: int
) -> None:
    """A model that cannot tell that it is no file might fail, so it is not run."""
    files: dict[str, Any] = {"parameters": {"square": {"string_value": "32"}}} if kind == "STRING" else {}
    if files:
        fake.config = config_of(kind, dims, batch, **files)
        await check(fake)
        assert fake.requests == []
        files["output"] = [*CONFIG["output"], {"name": "decoded", "data_type": "TYPE_INT32", "dims": [1]}]
    fake.config = config_of(kind, dims, batch, **files)
    await check(fake)
    (request,) = fake.requests
    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("image", sent_as, [1, *dims] if batch else dims)
    assert request.raw_input_contents == [content]
    assert (request.outputs[0].name, request.model_version) == ("output0", "")


@pytest.mark.parametrize(
    ("status", "said", "reason", "is_final"),
    [
        ("INTERNAL", "out of luck\nsomewhere", "inference of tiny failed: out of luck$", False),
        # The next check might reach another process of the same model.
        ("INTERNAL", "message: Stub process 'tiny_0_0' is not healthy.", "of tiny has died", True),
        ("UNAVAILABLE", "[request id: <id_unknown>] Exceeds maximum queue size", "", False),
        ("UNAVAILABLE", "Request timeout expired", "", False),
    ],
)
async def test_failed_inference_fails_the_check_unless_the_model_is_busy(
    fake: FakeTriton, status: str, said: str, reason: str, *, is_final: bool
) -> None:
    fake.refusal = grpc.StatusCode[status], said
    if not reason:
        await check(fake)
        return
    with pytest.raises(CheckError, match=reason) as caught:
        await check(fake)
    assert caught.value.is_final is is_final


async def test_empty_output_or_a_model_without_an_adapter_fails_the_check(fake: FakeTriton) -> None:
    """A backend that lost its shared memory answers without an error; the message names the empty tensor."""
    fake.answer = infer_response(output0=np.zeros((1, 0, 6), np.float32))
    with pytest.raises(CheckError, match="of tiny returned empty output0"):
        await check(fake)
    fake.config = {**CONFIG, "output": [{"name": "features", "data_type": "TYPE_FP32", "dims": [512, 20, 20]}]}
    with pytest.raises(CheckError, match="features FP32"):
        await check(fake)
    assert len(fake.requests) == 1


async def test_slow_inference_or_a_missing_server_fails_the_check(fake: FakeTriton) -> None:
    """This version of Triton crashes when an inference is cancelled, also by the end of its deadline, so it goes on."""
    fake.may_answer.clear()
    with pytest.raises(CheckError, match="inference of tiny failed: Triton did not answer in time"):
        await check(fake, 0.2)
    fake.may_answer.set()
    await check(fake)
    assert fake.cancelled == 0
    with pytest.raises(CheckError, match="inference of tiny failed"):
        check_inference(BlockingClient(f"127.0.0.1:{free_port()}"), "tiny", 10)


def test_processes_can_be_started_during_a_call() -> None:
    """By `serve`, whose checks run in threads: gRPC must not touch the new process."""
    code = "import os, app.triton.blocking_client; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRPC")}
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    assert said == "0\n"
