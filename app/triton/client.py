"""The gRPC channels to one Triton, and the calls the gateway makes over them."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app.errors import GatewayError, InvalidModelOutput, UnknownVersion
from app.model.reference import split_reference
from app.model.spec import ModelSpec
from app.telemetry.trace_context import TraceContext
from app.triton import control_key
from app.triton.credentials import Credentials
from app.triton.messages import InferResult, infer_request, read_response, to_json
from app.triton.server_info import ModelState, ServerInfo, join_states, state_of
from app.triton.shared_memory import Arena, Slot
from app.triton.status import Unanswered, from_grpc_error, from_query_error, own_message

# An RPC may take this much longer than its caller's deadline.
_BACKSTOP_SECONDS = 60.0
_QUERY_SECONDS = 2.0
_LEFT_SECONDS = 2.0  # longer than most inferences take
_UNREGISTER_ATTEMPTS = 20
# These RPCs do not carry the control key: a Triton has to allow them to everybody.
_WITHOUT_KEY = {"ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig"}
_ONNX_BACKEND = "onnxruntime"
MODEL_INFER = "/inference.GRPCInferenceService/ModelInfer"
"""The method for inferences whose requests are serialized already."""
OPTIONS: list[tuple[str, int | str]] = [
    # gRPC's default limit is 4 MiB, less than one FP32 image.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's default back-off grows to two minutes. The minimum is also the time-out of a connection attempt, which a lost packet
    # delays by one second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # The time-out is also Linux's TCP_USER_TIMEOUT: a connection breaks after three seconds without an acknowledgement, not after
    # a quarter of an hour. Triton closes a connection with more than one ping in five minutes.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 3000),
    # A proxy in the environment is meant for the web.
    ("grpc.enable_http_proxy", 0),
]


class TritonClient:
    """Calls one Triton. It must be used in the event loop in which it was created."""

    def __init__(  # noqa: PLR0913 - where a Triton is, who it is, and what it does not say
        self,
        address: str,
        control_key_path: Path | None = None,
        *,
        credentials: Credentials | None = None,
        host: str = "",
        ips: Sequence[str] = (),
        has_gpu: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect to a Triton at `host:port` or `unix:/path`.

        `control_key_path` is that of the file with the control key; None if Triton restricts no protocols. `host` is what Triton's
        certificate must name, and `ips` what to connect to, in order of preference; by default the host in the address. `has_gpu`
        tells whether the embedded Triton, whose configs name no GPU, runs its models on one.
        """
        self.address = address
        self._control_key_path = control_key_path
        self._has_gpu = has_gpu
        self._channel = _open_channel(address, credentials, host, ips)
        self._stub = GRPCInferenceServiceStub(self._channel)
        # Not part of the stub, because its requests are serialized already.
        self._model_infer = self._channel.unary_unary(MODEL_INFER, response_deserializer=service_pb2.ModelInferResponse.FromString)
        self.left: set[grpc.aio.Call] = set()
        """Unanswered inferences that must not be cancelled. Without a reference, gRPC would cancel them."""
        self.server: ServerInfo | None = None
        """Read when the channel connects; None while it is not connected."""
        self.connection = 0
        """Number of connections made so far. Triton may have been restarted before each of them."""
        self.connected_at = 0.0
        """When the last one was made, on the `time.monotonic` clock."""
        self._watching = asyncio.create_task(self._watch())

    @property
    def survives_cancel(self) -> bool:
        """Whether an inference may be cancelled; False while Triton's version is not known."""
        return self.server is not None and self.server.survives_cancel

    async def close(self) -> None:
        """Close the channel. Inferences that must not be cancelled have a few seconds to end before."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        await self._channel.close(grace=_LEFT_SECONDS if self.left else None)

    async def read_server(self) -> ServerInfo:
        """Ask for Triton's version and extensions."""
        answer = await self.ask("ServerMetadata")
        return ServerInfo(answer.version, tuple(answer.extensions))

    async def is_ready(self, model: str) -> bool:
        """Return whether a model is ready, by reference; False if Triton does not answer."""
        name, version = split_reference(model)
        with suppress(GatewayError):
            return bool((await self.ask("ModelReady", name=name, version=version)).ready)
        return False

    async def list_models(self) -> dict[str, ModelState]:
        """Return the models in Triton's repository by name. A model is ready if any of its versions is."""
        index = await self.ask("RepositoryIndex")
        return join_states((entry.name, state_of(entry.state, entry.reason, entry.version)) for entry in index.models)

    async def read_config(self, model: str) -> tuple[dict[str, Any], str]:
        """Return a model's config in Triton's JSON form, and its version: that of the reference, or else the newest loaded one.

        Raises UnknownModel, ModelNotReady if it is not loaded, or UnknownVersion, which names the loaded versions.
        """
        name, version = split_reference(model)
        metadata = await self.ask("ModelMetadata", name=name)
        loaded = sorted((number for number in metadata.versions if number.isdigit()), key=int)
        if version and version not in loaded:
            raise UnknownVersion(f"{name} has no version {version}; versions that can be used: {', '.join(loaded) or 'none'}")
        answer = await self.ask("ModelConfig", name=name, version=version)
        config = MessageToDict(answer.config, preserving_proto_field_name=True)
        if config.get("backend") == _ONNX_BACKEND and self._has_gpu():
            config.setdefault("parameters", {})["device"] = {"string_value": "gpu"}
        return config, version or next(reversed(loaded), "")

    async def register(self, arena: Arena) -> None:
        """Let Triton map an arena; other errors than TritonUnavailable most likely mean that it runs on another host."""
        try:
            await self.ask("SystemSharedMemoryRegister", name=arena.region, key=f"/{arena.name}", byte_size=arena.nbytes)
        except GatewayError as error:
            cause = error.__cause__  # region names are never reused, so another request may have registered this arena
            if not isinstance(cause, grpc.RpcError) or cause.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise

    async def list_regions(self) -> dict[str, str]:
        """Return the files of the regions that Triton has mapped, by region name."""
        answer = await self.ask("SystemSharedMemoryStatus")
        return {region.name: region.key.removeprefix("/") for region in answer.regions.values()}

    async def unregister(self, region: str) -> None:
        """Let Triton unmap a region; errors are ignored.

        Triton rejects this while an inference, possibly of a killed worker, reads the region. So the RPC is repeated for a while.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(_QUERY_SECONDS):
                for _ in range(_UNREGISTER_ATTEMPTS):
                    try:
                        await self.ask("SystemSharedMemoryUnregister", name=region)
                        break
                    except GatewayError as error:
                        if "currently in use" not in own_message(error):
                            break
                    await asyncio.sleep(_QUERY_SECONDS / _UNREGISTER_ATTEMPTS)

    async def ask(self, method: str, seconds: float | None = None, **fields: Any) -> Any:  # noqa: ANN401 - messages have no types
        """Make the RPC with this name and these fields, and the control key if it may need that; return the response.

        Raises TritonUnavailable without an answer in time, or another GatewayError if Triton refuses.
        """
        request = getattr(service_pb2, f"{method}Request")(**fields)
        timeout = _QUERY_SECONDS if seconds is None else seconds
        key = () if method in _WITHOUT_KEY else control_key.metadata(self._control_key_path)
        try:
            answer = await getattr(self._stub, method)(request, timeout=timeout, metadata=key)
        except grpc.RpcError as error:
            raise from_query_error(error) from error
        if answer is None:  # gRPC could not parse it
            raise InvalidModelOutput("Triton's answer cannot be read")
        return answer

    async def describe(self, method: str, model: str) -> Any:  # noqa: ANN401 - it has any members
        """Return the answer of an RPC about a model, such as `ModelConfig`, as Triton's HTTP does; errors are those of `ask`."""
        name, version = split_reference(model)
        return to_json(await self.ask(method, name=name, version=version))

    async def infer(  # noqa: PLR0913 - the parts of a request
        self,
        spec: ModelSpec,
        tensors: Sequence[NDArray[Any]],
        *,
        timeout_seconds: float,
        request_id: str = "",
        trace: TraceContext | None = None,
        slot: Slot | None = None,
        priority: int = 0,
        waits_for_connection: bool = False,
    ) -> InferResult:
        """Run one inference, at most `timeout_seconds` in Triton's queue and a minute; cancelled with this if Triton survives that.

        The tensors, one per image, are contiguous; encoded images are as `messages.write_bytes_element` writes them. `slot` is the
        registered shared memory of the first one, directly followed by the others; None to send them inline. Triton reads it until
        this returns, and possibly longer after `Disconnected` and `Unanswered`. `priority` is 1 for the highest of the levels in
        the model's config, and 0 for its default. Errors are those in `status`, and InvalidModelOutput.
        """
        request = infer_request(spec, tensors, timeout_seconds=timeout_seconds, request_id=request_id, slot=slot, priority=priority)
        metadata = None if trace is None else trace.headers
        seconds = max(0.0, timeout_seconds) + _BACKSTOP_SECONDS
        timeout = seconds if self.survives_cancel else None  # gRPC cancels the RPC then
        call = self._model_infer(request, timeout=timeout, metadata=metadata, wait_for_ready=waits_for_connection)
        try:
            if timeout is None and not await self._ends(call, seconds):
                raise Unanswered("Triton did not answer in time")
            answer = await call
        except grpc.RpcError as error:
            raise from_grpc_error(error) from error
        return read_response(answer)

    async def _ends(self, call: grpc.aio.Call, seconds: float) -> bool:
        """Return whether a call ends within this time. If not, or if this is cancelled, the call continues if it was sent."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = loop.create_future()

        def end(is_ended: bool, *_: object) -> None:  # noqa: FBT001 - a callback
            if not ended.done():
                ended.set_result(is_ended)

        call.add_done_callback(partial(end, True))  # noqa: FBT003
        timer = loop.call_later(seconds, end, False)  # noqa: FBT003
        try:
            return await ended
        finally:
            timer.cancel()
            if not call.done():
                if self._channel.get_state() is grpc.ChannelConnectivity.READY:
                    self.left.add(call)
                    call.add_done_callback(self.left.discard)
                else:
                    call.cancel()

    async def _watch(self) -> None:
        while True:
            state = self._channel.get_state(try_to_connect=True)
            self.server = None
            if state is grpc.ChannelConnectivity.READY:
                self.connection += 1
                self.connected_at = monotonic()
                try:
                    self.server = await self.read_server()
                except GatewayError:
                    await asyncio.sleep(_QUERY_SECONDS)
                    continue
            await self._channel.wait_for_state_change(state)


def _open_channel(address: str, credentials: Credentials | None, host: str, ips: Sequence[str]) -> grpc.aio.Channel:
    options = list(OPTIONS)
    if ips:  # the certificate and proxies refer to the name
        options.append(("grpc.default_authority", address))
        port = address.rpartition(":")[2]
        address = "ipv6:" + ",".join(f"[{ip}]:{port}" if ":" in ip else f"[::ffff:{ip}]:{port}" for ip in ips)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    if host:
        options.append(("grpc.ssl_target_name_override", host))
    tls = grpc.ssl_channel_credentials(credentials.roots, credentials.key, credentials.certificates)
    return grpc.aio.secure_channel(address, tls, options=options)
