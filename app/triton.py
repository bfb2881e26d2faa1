"""The only module that talks to Triton. An inference under way is never cancelled unless Triton survives that."""

import asyncio
import re
from collections.abc import Awaitable
from contextlib import suppress
from time import monotonic
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app import contract, refusals, tensors
from app.arena import Arena, Slot
from app.contract import Contract
from app.errors import DeadlinePassed, GatewayError, TritonUnavailable
from app.once import Once

# Before this version a cancelled or expired RPC can crash the whole server.
# Source: triton-inference-server/server pull requests 7840, 8078, 8220.
_CANCEL_SAFE = (2, 59, 1)
# An RPC we gave up on may go on for this long; only a server that hangs for good needs it.
_BACKSTOP_SECONDS = 60.0
_PROBE_SECONDS = 2.0
_UNREGISTER_TRIES = 20
_CONTRACT_SECONDS = 60.0
_MAX_ABANDONED = 64  # each holds a slot or its pixels
_DRAIN_SECONDS = 8.0

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
        self._reading: Once[Contract] = Once()
        self._abandoned: set[asyncio.Task[None]] = set()
        self.may_cancel = False

    async def drain(self) -> None:
        """Let inferences that were given up on end: until then, Triton reads their slots."""
        if self._abandoned:
            await asyncio.wait(self._abandoned, timeout=_DRAIN_SECONDS)

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()

    async def version(self) -> str:
        """Ask for Triton's own version.

        Raises:
            TritonUnavailable: It does not answer.
        """
        answer = await self._probe(self._stub.ServerMetadata(messages.ServerMetadataRequest(), timeout=_PROBE_SECONDS))
        version: str = answer.version
        self.may_cancel = tuple(int(part) for part in re.findall(r"\d+", version)[:3]) >= _CANCEL_SAFE
        return version

    async def is_ready(self, name: str) -> bool:
        """Tell whether a model can be asked; False also when Triton is not there."""
        with suppress(grpc.RpcError):
            return bool((await self._stub.ModelReady(messages.ModelReadyRequest(name=name), timeout=_PROBE_SECONDS)).ready)
        return False

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
        return await self._reading.ask(name, lambda: self._read_contract(name))

    async def _read_contract(self, name: str) -> Contract:
        await self.version()
        metadata = await self._probe(self._stub.ModelMetadata(messages.ModelMetadataRequest(name=name), timeout=_PROBE_SECONDS))
        config = await self._probe(self._stub.ModelConfig(messages.ModelConfigRequest(name=name), timeout=_PROBE_SECONDS))
        newest = max((version for version in metadata.versions if version.isdigit()), key=int, default="")
        known = contract.read(MessageToDict(config.config, preserving_proto_field_name=True), newest)
        self._contracts[name] = known, monotonic() + _CONTRACT_SECONDS
        return known

    async def register(self, region: str, nbytes: int, seconds: float = _PROBE_SECONDS) -> None:
        """Let Triton map a shared-memory region: the file of that name in /dev/shm.

        Raises:
            GatewayError: It does not answer (TritonUnavailable), or refused; most likely it runs elsewhere.
        """
        request = messages.SystemSharedMemoryRegisterRequest(name=region, key=f"/{region}", byte_size=nbytes)
        try:
            await self._stub.SystemSharedMemoryRegister(request, timeout=min(seconds, _PROBE_SECONDS))
        except grpc.RpcError as error:
            # Names are never used twice, so it is this one: another request was faster.
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise refusals.of_question(error) from error

    async def unregister(self, region: str) -> None:
        """Let Triton forget a region; no matter whether it knows it, or is there at all.

        While an inference still reads it, Triton refuses. That may be one of a worker that was killed a moment ago.
        """
        request = messages.SystemSharedMemoryUnregisterRequest(name=region)
        with suppress(TimeoutError):
            async with asyncio.timeout(_PROBE_SECONDS):
                for _ in range(_UNREGISTER_TRIES):
                    try:
                        await self._stub.SystemSharedMemoryUnregister(request)
                        break
                    except grpc.RpcError as error:
                        if not refusals.is_in_use(error):
                            break
                    await asyncio.sleep(_PROBE_SECONDS / _UNREGISTER_TRIES)

    async def infer(
        self, model: Contract, tensor: NDArray[Any], timeout_seconds: float, request_id: str, slot: Slot | None = None
    ) -> tensors.Answer:
        """Run one inference.

        Args:
            model: The contract of the model to ask.
            tensor: Its input, with the batch dimension where the model has one; a file as `tensors.of_file` writes it.
            timeout_seconds: When to give up on the answer. The RPC itself goes on, unless it reads no slot and Triton
                survives a cancel.
            request_id: For Triton's own log.
            slot: What `tensor` lies in, if it is in shared memory; freed here, once the RPC has ended. If Triton was
                restarted it is registered again; if that is refused, the tensor travels inside the request.

        Raises:
            DeadlinePassed: No answer in time.
            TritonUnavailable, ModelNotReady, UnknownModel: Triton refused.
            ModelNonsense: Triton failed to run the model, or the answer does not hold together.
        """
        deadline = monotonic() + timeout_seconds
        call = None

        async def ask(via: Slot | None) -> messages.ModelInferResponse:
            nonlocal call
            left = deadline - monotonic()
            call = self._model_infer(tensors.request(model, tensor, left, request_id, via), timeout=left + _BACKSTOP_SECONDS)
            return await _within(call, left)

        try:
            if len(self._abandoned) >= _MAX_ABANDONED:
                raise TritonUnavailable("too many inferences that were given up on have not ended")
            try:
                answer = await ask(slot)
            except grpc.RpcError as error:
                if slot is None or not refusals.is_stale(error):
                    raise
                answer = await ask(slot if await self._is_registered_again(slot.arena, deadline - monotonic()) else None)
        except grpc.RpcError as error:
            refusal = refusals.ours(error)
            if not isinstance(refusal, TritonUnavailable | DeadlinePassed):
                self._contracts.pop(model.name, None)  # it may have changed
            raise refusal from error
        finally:
            if call is not None and not call.done():
                self._abandon(call, slot)
            elif slot is not None:
                slot.free()
        return tensors.answer(answer)

    async def _is_registered_again(self, arena: Arena, seconds: float) -> bool:
        try:
            await self.register(arena.name, arena.nbytes, seconds)
        except GatewayError as error:
            if isinstance(error, TritonUnavailable):
                raise
            arena.is_refused = True
            return False
        return True

    def _abandon(self, call: grpc.aio.UnaryUnaryCall, slot: Slot | None) -> None:
        """Leave an RPC alone; its slot is free once it has ended.

        Who still reads a slot must not be cut off from it: another picture would take its place.
        """
        if self.may_cancel and slot is None:
            call.cancel()
        ending = asyncio.create_task(_ended(call, slot))
        self._abandoned.add(ending)
        ending.add_done_callback(self._abandoned.discard)

    async def _probe(self, question: Awaitable[Any]) -> Any:  # noqa: ANN401 - generated messages have no types
        try:
            return await question
        except grpc.RpcError as error:
            raise refusals.of_question(error) from error


async def _ended(call: grpc.aio.UnaryUnaryCall, slot: Slot | None) -> None:
    await call.code()
    if slot is not None:
        slot.free()


async def _within(call: grpc.aio.UnaryUnaryCall, seconds: float) -> messages.ModelInferResponse:
    """Await an RPC for a while, without ending it: neither the deadline nor a cancel of ours goes on to Triton.

    Raises:
        DeadlinePassed: It has not ended yet.
        grpc.RpcError: It ended badly.
    """
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await call.code()  # who waits for this may leave; who waits for the call itself would cancel it
    except TimeoutError as error:
        raise DeadlinePassed("the model did not answer in time") from error
    return await call
