"""The only module that talks to Triton.

Its errors become ours here; an inference under way is never cancelled unless Triton is new enough to survive it.
"""

import asyncio
import re
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple

import grpc
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app import contract, tensors
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
    # gRPC's own limit is 4 MB, less than one FP32 picture.
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
        self._channel = grpc.aio.insecure_channel(url, options=_CHANNEL)
        self._stub = GRPCInferenceServiceStub(self._channel)
        # Apart from the others, since its requests come serialized.
        self._model_infer = self._channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", response_deserializer=messages.ModelInferResponse.FromString
        )
        self._contracts: dict[str, tuple[Contract, float]] = {}
        """By model, and when to ask again: a model may change while Triton is restarted behind our back."""
        self._abandoned: set[grpc.aio.UnaryUnaryCall] = set()
        self.may_cancel = False

    async def close(self) -> None:
        """Let RPCs that were given up on end, then close the channel."""
        if self._abandoned:
            await asyncio.wait([asyncio.ensure_future(call.code()) for call in self._abandoned], timeout=_BACKSTOP_SECONDS)
        await self._channel.close()

    async def version(self) -> str:
        """Ask for Triton's own version.

        Raises:
            TritonUnavailable: It does not answer.
        """
        metadata = await self._probe(self._stub.ServerMetadata(messages.ServerMetadataRequest(), timeout=_PROBE_SECONDS))
        version = str(metadata.version)
        self.may_cancel = tuple(int(part) for part in re.findall(r"\d+", version)[:3]) >= _CANCEL_SAFE
        return version

    async def is_ready(self, name: str) -> bool:
        """Tell whether a model can be asked; False also when Triton is not there."""
        try:
            answer = await self._stub.ModelReady(messages.ModelReadyRequest(name=name), timeout=_PROBE_SECONDS)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    async def models(self) -> dict[str, str]:
        """List the models in Triton's repository with their state: READY, UNAVAILABLE ..., or empty if never loaded.

        Raises:
            TritonUnavailable: It does not answer.
        """
        index = await self._probe(self._stub.RepositoryIndex(messages.RepositoryIndexRequest(), timeout=_PROBE_SECONDS))
        states: dict[str, str] = {}
        for model in index.models:  # one entry a version
            if states.get(model.name) != "READY":
                states[model.name] = model.state
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
        metadata = await self._probe(self._stub.ModelMetadata(messages.ModelMetadataRequest(name=name), timeout=_PROBE_SECONDS))
        config = await self._probe(self._stub.ModelConfig(messages.ModelConfigRequest(name=name), timeout=_PROBE_SECONDS))
        versions = [version for version in metadata.versions if version.isdigit()]
        as_dict = MessageToDict(config.config, preserving_proto_field_name=True)
        known = contract.read(as_dict, max(versions, key=int, default=""))
        self._contracts[name] = known, monotonic() + _CONTRACT_SECONDS
        return known

    async def register(self, region: str, nbytes: int) -> None:
        """Let Triton map a shared-memory region: the file of that name in /dev/shm.

        Raises:
            GatewayError: It refused; most likely it runs elsewhere.
        """
        request = messages.SystemSharedMemoryRegisterRequest(name=region, key=f"/{region}", byte_size=nbytes)
        try:
            await self._stub.SystemSharedMemoryRegister(request, timeout=_PROBE_SECONDS)
        except grpc.RpcError as error:
            # Names are never used twice, so it is this one: another request was faster.
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise _ours(error) from error

    async def unregister(self, region: str) -> None:
        """Let Triton forget a region; no matter whether it knows it, or is there at all."""
        request = messages.SystemSharedMemoryUnregisterRequest(name=region)
        with suppress(grpc.RpcError):
            await self._stub.SystemSharedMemoryUnregister(request, timeout=_PROBE_SECONDS)

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
        deadline = monotonic() + timeout_seconds
        request = tensors.request(model, tensor, timeout_seconds, request_id, slot)
        call = self._model_infer(request, timeout=timeout_seconds + _BACKSTOP_SECONDS)
        try:
            try:
                answer = await _within(call, timeout_seconds)
            except grpc.RpcError as error:
                if slot is None or _STALE_REGION not in (error.details() or ""):
                    raise
                await self.register(slot.arena.name, slot.arena.nbytes)  # Triton was restarted, and has forgotten it
                call = self._model_infer(request, timeout=timeout_seconds + _BACKSTOP_SECONDS)
                answer = await _within(call, deadline - monotonic())
        except grpc.RpcError as error:
            self._contracts.pop(model.name, None)
            raise _ours(error) from error
        finally:
            if not call.done():
                self._abandon(call, slot)
            elif slot is not None:
                slot.free()
        return Answer(tensors.outputs(answer), answer.model_version)

    def _abandon(self, call: grpc.aio.UnaryUnaryCall, slot: Slot | None) -> None:
        """Leave an RPC alone; its slot is free once it has ended.

        Who still reads a slot must not be cut off from it: another picture would take its place.
        """

        def bury(_: object) -> None:
            self._abandoned.discard(call)
            if slot is not None:
                slot.free()

        self._abandoned.add(call)
        call.add_done_callback(bury)
        if self.may_cancel and slot is None:
            call.cancel()

    async def _probe(self, question: Awaitable[Any]) -> Any:  # noqa: ANN401 - generated messages have no types
        try:
            return await question
        except grpc.RpcError as error:
            raise _ours(error) from error


async def _within(call: grpc.aio.UnaryUnaryCall, seconds: float) -> messages.ModelInferResponse:
    """Await an RPC for a while, without ending it: neither the deadline nor a cancel of ours goes on to Triton.

    Raises:
        DeadlinePassed: It has not ended yet.
        grpc.RpcError: It ended badly.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end(_: object = None) -> None:
        if not ended.done():
            ended.set_result(None)

    call.add_done_callback(end)
    timer = loop.call_later(max(0.0, seconds), end)
    try:
        await ended
    finally:
        timer.cancel()
    if not call.done():
        raise DeadlinePassed("the model did not answer in time")
    return await call


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


def _ours(error: grpc.RpcError) -> GatewayError:
    code, details = error.code().name, error.details() or ""
    for status, part, ours, detail in _ERRORS:
        if status == code and part in details:
            return ours(detail)
    return ModelNonsense("the model could not be run")
