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


class Checked:
    """A server, and the check of its model in a thread."""

    def __init__(self, fake: FakeTriton, client: BlockingClient) -> None:
        self.fake, self.client = fake, client

    async def check(self, seconds: float = 10) -> None:
        await asyncio.to_thread(check_inference, self.client, "tiny", seconds)


@pytest.fixture
async def checked() -> AsyncIterator[Checked]:
    fake = FakeTriton()
    fake.answer = infer_response(output0=np.zeros((1, 2, 6), np.float32))
    async with serving(fake):
        client = BlockingClient(fake.url)
        yield Checked(fake, client)
        fake.may_answer.set()


def config_of(kind: str, dims: list[int], batch: int = 4, **others: Any) -> dict[str, Any]:  # noqa: ANN401 - Triton's JSON
    return {**CONFIG, "max_batch_size": batch, "input": [{"name": "image", "data_type": f"TYPE_{kind}", "dims": dims}], **others}


@pytest.mark.parametrize("batch", [4, 0])
@pytest.mark.parametrize(
    ("kind", "dims", "size"),
    [("UINT8", [32, 48, 3], 1), ("FP32", [3, 32, 48], 4), ("FP16", [3, 32, 48], 2)],
)
async def test_blank_image_of_the_models_type_is_sent(checked: Checked, kind: str, dims: list[int], size: int, batch: int) -> None:
    checked.fake.config = config_of(kind, dims, batch)
    await checked.check()
    (request,) = checked.fake.requests

    (tensor,) = request.inputs
    assert (tensor.name, tensor.datatype, list(tensor.shape)) == ("image", kind, [1, *dims] if batch else dims)
    assert request.raw_input_contents == [bytes(32 * 48 * 3 * size)]
    assert ([output.name for output in request.outputs], request.model_version) == (["output0"], "")


@pytest.mark.parametrize("batch", [4, 0])
async def test_empty_file_is_sent_to_a_model_that_can_tell_that_it_is_none(checked: Checked, batch: int) -> None:
    """Other models that take files might fail, so they are not run."""
    config = config_of("STRING", [1], batch, parameters={"square": {"string_value": "32"}})
    checked.fake.config = config
    await checked.check()
    assert checked.fake.requests == []
    checked.fake.config = {**config, "output": [*CONFIG["output"], {"name": "decoded", "data_type": "TYPE_INT32", "dims": [1]}]}
    await checked.check()
    (request,) = checked.fake.requests

    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("BYTES", [1, 1] if batch else [1])
    assert request.raw_input_contents == [bytes(4)]


async def test_empty_output_fails_the_check(checked: Checked) -> None:
    """A backend that lost its shared memory answers without an error; the message names the empty tensor."""
    checked.fake.answer = infer_response(output0=np.zeros((1, 0, 6), np.float32))
    with pytest.raises(CheckError, match="of tiny returned empty output0"):
        await checked.check()


@pytest.mark.parametrize(
    ("status", "said", "reason", "is_final"),
    [
        ("INTERNAL", "out of luck\nsomewhere", "inference of tiny failed: out of luck$", False),
        # The next check might reach another process of the same model.
        ("INTERNAL", "message: Stub process 'tiny_0_0' is not healthy.", "of tiny has died", True),
    ],
)
async def test_failed_inference_fails_the_check(checked: Checked, status: str, said: str, reason: str, is_final: bool) -> None:  # noqa: FBT001
    checked.fake.refusal = grpc.StatusCode[status], said
    with pytest.raises(CheckError, match=reason) as caught:
        await checked.check()

    assert caught.value.is_final is is_final


@pytest.mark.parametrize("said", ["Exceeds maximum queue size", "Request timeout expired"])
async def test_busy_model_passes_the_check(checked: Checked, said: str) -> None:
    checked.fake.refusal = grpc.StatusCode.UNAVAILABLE, f"[request id: <id_unknown>] {said}"
    await checked.check()

    assert len(checked.fake.requests) == 1


async def test_slow_inference_fails_the_check_and_goes_on(checked: Checked) -> None:
    """This version of Triton crashes when an inference is cancelled, also by the end of its deadline."""
    checked.fake.may_answer.clear()
    with pytest.raises(CheckError, match="inference of tiny failed: Triton did not answer in time"):
        await checked.check(0.2)
    checked.fake.may_answer.set()
    await checked.check()

    assert checked.fake.cancelled == 0


async def test_model_without_an_adapter_fails_the_check(checked: Checked) -> None:
    checked.fake.config = {**CONFIG, "output": [{"name": "features", "data_type": "TYPE_FP32", "dims": [512, 20, 20]}]}
    with pytest.raises(CheckError, match="features FP32"):
        await checked.check()

    assert checked.fake.requests == []


def test_processes_can_be_started_during_a_call() -> None:
    """By `serve`, whose checks run in threads: gRPC must not touch the new process."""
    code = "import os, app.triton.blocking_client; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRPC")}
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout

    assert said == "0\n"


def test_missing_server_fails_the_check() -> None:
    with pytest.raises(CheckError, match="inference of tiny failed"):
        check_inference(BlockingClient(f"127.0.0.1:{free_port()}"), "tiny", 10)
