"""The only module that talks to Triton.

Its errors become ours here; an inference under way is never cancelled unless Triton is new enough to survive it.
"""

import asyncio
import re
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any, NamedTuple

from numpy.typing import NDArray
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from app import contract
from app.arena import Slot
from app.contract import Contract
from app.errors import DeadlinePassed, GatewayError, ModelNonsense, ModelNotReady, TritonUnavailable, UnknownModel

# Before this version a cancelled or expired RPC can crash the whole server.
# Source: triton-inference-server/server pull requests 7840, 8078, 8220.
_CANCEL_SAFE = (2, 59, 1)
# An RPC we gave up on may go on for this long; only a server that hangs for good needs it.
_BACKSTOP_SECONDS = 60.0
_PROBE_SECONDS = 2.0
_CONTRACT_SECONDS = 60.0
_STALE_REGION = "Unable to find shared memory region"

_CHANNEL = [
    # Passing any argument drops tritonclient's own, so the message sizes are said again.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's own back-off grows to two minutes, long after Triton is back. The least is also how long a connect may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # A proxy in the environment is for the web, not for an inference server.
    ("grpc.enable_http_proxy", 0),
]


class Answer(NamedTuple):
    """What Triton returned for one picture."""

    outputs: Mapping[str, NDArray[Any]]
    version: str


class Triton:
    """One gRPC channel to one Triton; belongs to the event loop it was made in."""

    def __init__(self, url: str) -> None:
        self._client = InferenceServerClient(url, channel_args=_CHANNEL)
        self._contracts: dict[str, tuple[Contract, float]] = {}
        """By model, and when to ask again: a model may change while Triton is restarted behind our back."""
        self._abandoned: set[asyncio.Task[Any]] = set()
        self._may_cancel = False

    async def close(self) -> None:
        """Let RPCs that were given up on end, then close the channel."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=_BACKSTOP_SECONDS)
        await self._client.close()

    async def version(self) -> str:
        """Ask for Triton's own version.

        Raises:
            TritonUnavailable: It does not answer.
        """
        metadata = await self._probe(self._client.get_server_metadata(client_timeout=_PROBE_SECONDS, as_json=True))
        version = str(metadata["version"])
        self._may_cancel = tuple(int(part) for part in re.findall(r"\d+", version)[:3]) >= _CANCEL_SAFE
        return version

    async def is_ready(self, name: str) -> bool:
        """Tell whether a model can be asked; False also when Triton is not there."""
        try:
            return bool(await self._client.is_model_ready(name, client_timeout=_PROBE_SECONDS))
        except InferenceServerException:
            return False

    async def models(self) -> dict[str, str]:
        """List the models in Triton's repository with their state: READY, UNAVAILABLE ..., or empty if never loaded.

        Raises:
            TritonUnavailable: It does not answer.
        """
        index = await self._probe(self._client.get_model_repository_index(client_timeout=_PROBE_SECONDS, as_json=True))
        states: dict[str, str] = {}
        for model in index.get("models", []):  # one entry a version
            if states.get(model["name"]) != "READY":
                states[model["name"]] = model.get("state", "")
        return states

    async def contract(self, name: str) -> Contract:
        """Read a model's contract; asked of Triton once a minute, and again after an inference that failed.

        Raises:
            UnknownModel, ModelNotReady, TritonUnavailable: There is no such model, it is not loaded, or Triton is gone.
            UnsupportedLayout: No adapter fits it.
        """
        known, until = self._contracts.get(name, (None, 0.0))
        if known is not None and monotonic() < until:
            return known
        await self.version()
        metadata = await self._probe(self._client.get_model_metadata(name, client_timeout=_PROBE_SECONDS, as_json=True))
        config = await self._probe(self._client.get_model_config(name, client_timeout=_PROBE_SECONDS, as_json=True))
        versions = [v for v in metadata.get("versions", []) if v.isdigit()]
        known = contract.read(config["config"], max(versions, key=int, default=""))
        self._contracts[name] = known, monotonic() + _CONTRACT_SECONDS
        return known

    async def register(self, region: str, nbytes: int) -> None:
        """Let Triton map a shared-memory region: the file of that name in /dev/shm.

        Raises:
            GatewayError: It refused; most likely it runs elsewhere.
        """
        try:
            await self._client.register_system_shared_memory(region, f"/{region}", nbytes, client_timeout=_PROBE_SECONDS)
        except InferenceServerException as error:
            # Names are never used twice, so it is this one: another request was faster.
            if error.status() != "StatusCode.ALREADY_EXISTS":
                raise _ours(error) from error

    async def unregister(self, region: str) -> None:
        """Let Triton forget a region; no matter whether it knows it, or is there at all."""
        with suppress(InferenceServerException):
            await self._client.unregister_system_shared_memory(region, client_timeout=_PROBE_SECONDS)

    async def infer(
        self, model: Contract, tensor: NDArray[Any], timeout_seconds: float, request_id: str, slot: Slot | None = None
    ) -> Answer:
        """Run one inference.

        Args:
            model: The contract of the model to ask.
            tensor: Its input, with the batch dimension where the model has one; an object array for BYTES.
            timeout_seconds: When to give up on the answer. The RPC itself goes on unless Triton survives a cancel.
            request_id: For Triton's own log.
            slot: What `tensor` lies in, if it is in shared memory; freed here, once the RPC has ended.

        Raises:
            DeadlinePassed: No answer in time.
            TritonUnavailable, ModelNotReady, UnknownModel: Triton refused.
            ModelNonsense: Triton failed to run the model, or the answer does not hold together.
        """
        call = asyncio.ensure_future(self._ask(model, tensor, timeout_seconds, request_id, slot))
        if slot is not None:
            call.add_done_callback(lambda _: slot.free())
        try:
            done, _ = await asyncio.wait({call}, timeout=max(0.0, timeout_seconds))
        finally:
            if not call.done():
                # Who still reads a slot must not be cut off from it: another picture would take its place.
                self._abandon(call, may_cancel=self._may_cancel and slot is None)
        if not done:
            raise DeadlinePassed("the model did not answer in time")
        try:
            result = call.result()
            outputs = {output: result.as_numpy(output) for output in model.outputs}
        except InferenceServerException as error:
            self._contracts.pop(model.name, None)
            raise _ours(error) from error
        except ValueError as error:  # as_numpy: the bytes do not fill the shape
            raise ModelNonsense(f"{model.name} returned a tensor whose size is not that of its shape") from error
        present = {output: values for output, values in outputs.items() if values is not None}
        return Answer(present, str(result.get_response().model_version))

    async def _ask(
        self, model: Contract, tensor: NDArray[Any], timeout_seconds: float, request_id: str, slot: Slot | None
    ) -> InferResult:
        tensor_in = InferInput(model.input, list(tensor.shape), np_to_triton_dtype(tensor.dtype))
        if slot is None:
            tensor_in.set_data_from_numpy(tensor)
        else:
            tensor_in.set_shared_memory(slot.arena.name, tensor.nbytes, slot.offset)
        ask = partial(
            self._client.infer,
            model.name,
            [tensor_in],
            outputs=[InferRequestedOutput(output) for output in model.outputs],
            request_id=request_id,
            timeout=max(1, int(timeout_seconds * 1e6)),
            client_timeout=timeout_seconds + _BACKSTOP_SECONDS,
        )
        try:
            return await ask()
        except InferenceServerException as error:
            if slot is None or _STALE_REGION not in str(error.message()):
                raise
            await self.register(slot.arena.name, slot.arena.nbytes)  # Triton was restarted, and has forgotten it
            return await ask()

    def _abandon(self, call: asyncio.Task[Any], *, may_cancel: bool) -> None:
        if may_cancel:
            call.cancel()
        self._abandoned.add(call)
        call.add_done_callback(self._bury)

    def _bury(self, call: asyncio.Task[Any]) -> None:
        self._abandoned.discard(call)
        if not call.cancelled():
            call.exception()  # nobody else will look at it

    async def _probe(self, question: Awaitable[Any]) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = await question
        except InferenceServerException as error:
            raise _ours(error) from error
        return answer


# By status and, since the status alone is ambiguous, a part of the message. First match wins.
# Source: measured on Triton 2.51.
_ERRORS: tuple[tuple[str, str, type[GatewayError], str], ...] = (
    ("UNAVAILABLE", "Request timeout expired", DeadlinePassed, "the request waited too long in the model's queue"),
    ("UNAVAILABLE", "maximum queue size", TritonUnavailable, "the model's queue is full"),
    ("UNAVAILABLE", "Request for unknown model", ModelNotReady, "the model is not loaded"),
    ("UNAVAILABLE", "", TritonUnavailable, "Triton does not answer"),
    ("NOT_FOUND", "", UnknownModel, "there is no such model"),
    ("DEADLINE_EXCEEDED", "", DeadlinePassed, "Triton did not answer in time"),
    ("INTERNAL", "is not healthy", TritonUnavailable, "the model's process has died"),
    ("CANCELLED", "", TritonUnavailable, "Triton dropped the request"),
)


def _ours(error: InferenceServerException) -> GatewayError:
    status, message = str(error.status() or "").removeprefix("StatusCode."), str(error.message())
    for code, part, ours, detail in _ERRORS:
        if status == code and part in message:
            return ours(detail)
    return ModelNonsense("the model could not be run")
