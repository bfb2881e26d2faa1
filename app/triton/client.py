"""The gRPC channels to one Triton, and the calls the gateway makes over them."""

import asyncio
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app.errors import GatewayError, InvalidModelOutput, TritonUnavailable, UnknownVersion
from app.model.reference import split_reference
from app.model.spec import ModelSpec
from app.telemetry.trace_context import TraceContext
from app.triton import control_key
from app.triton.credentials import Credentials
from app.triton.messages import InferResult, infer_request, read_response
from app.triton.server_info import ModelState, ServerInfo, join_states, state_of
from app.triton.shared_memory import Arena, Slot
from app.triton.status import Unanswered, from_grpc_error, from_query_error, is_region_in_use, is_restricted

# How much longer than its caller's deadline an RPC is waited for.
_BACKSTOP_SECONDS = 60.0
_QUERY_SECONDS = 2.0
_UNREGISTER_ATTEMPTS = 20
_OPTIONS: list[tuple[str, int | str]] = [
    # gRPC's default limit is 4 MiB, less than one FP32 image.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's default back-off grows to two minutes. The minimum is the time a connection attempt may take: a lost packet costs one
    # second of it, or three if the next one is lost, too.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A connection breaks when the other host has confirmed nothing for three seconds, instead of a quarter of an hour. Linux
    # does that if keep-alive is on; pings more often than each five minutes would make Triton close the connection.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 3000),
    # A proxy in the environment is for the web, not for an inference server.
    ("grpc.enable_http_proxy", 0),
]


class TritonClient:
    """Calls one Triton. Belongs to the event loop it was created in."""

    def __init__(  # noqa: PLR0913 - how a Triton is reached
        self,
        address: str,
        control_key_path: Path | None = None,
        *,
        credentials: Credentials | None = None,
        host: str = "",
        ips: Sequence[str] = (),
        connections: int = 1,
    ) -> None:
        """Connect to a Triton.

        Args:
            address: `host:port` of its gRPC endpoint.
            control_key_path: The file with the key of its restricted protocols, if they are.
            credentials: For TLS; None sends everything unencrypted.
            host: The host that its certificate must name; empty: that in the address.
            ips: IP addresses to connect to, of which the first that answers is used; none: the host in the address.
            connections: Over how many connections inferences are spread.
        """
        self.address = address
        self._control_key_path = control_key_path
        self._channels = _open_channels(address, credentials, host, ips, connections)
        self._stub = GRPCInferenceServiceStub(self._channels[0])
        # Not part of the stub, because its requests are serialized already.
        self._model_infer = cycle(
            [
                (
                    channel,
                    channel.unary_unary(
                        "/inference.GRPCInferenceService/ModelInfer",
                        response_deserializer=service_pb2.ModelInferResponse.FromString,
                    ),
                )
                for channel in self._channels
            ]
        )
        self.left: set[grpc.aio.Call] = set()
        """Inferences that had no answer for too long, and must not be cancelled; one that nobody refers to would be."""
        self.server: ServerInfo | None = None
        """As read when the first channel connected; None while it is not connected."""
        self.connection = 0
        """Number of the newest connection; Triton may have been restarted since the one before."""
        self._watching = [asyncio.create_task(self._watch(channel)) for channel in self._channels]

    @property
    def survives_cancel(self) -> bool:
        """Whether an inference may be cancelled; False while that is not known."""
        return self.server is not None and self.server.survives_cancel

    async def close(self) -> None:
        """Close the channels."""
        for watching in self._watching:
            watching.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def read_server(self) -> ServerInfo:
        """Ask for Triton's version and extensions.

        Raises:
            TritonUnavailable: Triton does not answer.
        """
        answer = await _query(self._stub.ServerMetadata(service_pb2.ServerMetadataRequest(), timeout=_QUERY_SECONDS))
        return ServerInfo(answer.version, tuple(answer.extensions))

    async def is_ready(self, model: str) -> bool:
        """Return whether a model, named by its reference, is ready; False also when Triton does not answer."""
        name, version = split_reference(model)
        request = service_pb2.ModelReadyRequest(name=name, version=version)
        with suppress(GatewayError):
            return bool((await _query(self._stub.ModelReady(request, timeout=_QUERY_SECONDS))).ready)
        return False

    async def list_models(self) -> dict[str, ModelState]:
        """List the models in Triton's repository, by name; one is ready if one of its versions is.

        Raises:
            TritonUnavailable: Triton does not answer.
            GatewayError: Triton does not tell.
        """
        index = await self.ask("RepositoryIndex", service_pb2.RepositoryIndexRequest())
        return join_states((entry.name, state_of(entry.state, entry.reason, entry.version)) for entry in index.models)

    async def read_config(self, model: str) -> tuple[dict[str, Any], str]:
        """Ask for a model's config, as Triton's JSON, and its version: that of the reference, else the newest that is loaded.

        Raises:
            UnknownModel, UnknownVersion: There is no such model, or it is loaded in other versions, which the message names.
            ModelNotReady: It is not loaded.
            TritonUnavailable: Triton does not answer.
        """
        name, version = split_reference(model)
        metadata = await _query(self._stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=name), timeout=_QUERY_SECONDS))
        loaded = sorted((number for number in metadata.versions if number.isdigit()), key=int)
        if version and version not in loaded:
            raise UnknownVersion(f"{name} has no version {version}; versions that can be used: {', '.join(loaded) or 'none'}")
        request = service_pb2.ModelConfigRequest(name=name, version=version)
        answer = await _query(self._stub.ModelConfig(request, timeout=_QUERY_SECONDS))
        return MessageToDict(answer.config, preserving_proto_field_name=True), version or next(reversed(loaded), "")

    async def register(self, arena: Arena) -> None:
        """Let Triton map an arena.

        Raises:
            TritonUnavailable: Triton does not answer, or has just been started and has no key yet.
            GatewayError: Triton rejected it; most likely it runs on another host.
        """
        request = service_pb2.SystemSharedMemoryRegisterRequest(name=arena.region, key=f"/{arena.name}", byte_size=arena.nbytes)
        try:
            await self._stub.SystemSharedMemoryRegister(request, timeout=_QUERY_SECONDS, metadata=self._control_metadata)
        except grpc.RpcError as error:
            if is_restricted(error) and self._control_key_path is not None and not self._control_key_path.exists():
                raise TritonUnavailable("the key of Triton's controls is not known yet") from error
            # Region names are never reused, so a name that exists is this arena: another request has registered it.
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                raise from_query_error(error) from error

    async def list_regions(self) -> dict[str, str]:
        """List the regions that Triton has mapped: names, and the names of their files.

        Raises:
            TritonUnavailable: Triton does not answer.
        """
        answer = await self.ask("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest())
        return {region.name: region.key.removeprefix("/") for region in answer.regions.values()}

    async def unregister(self, region: str) -> None:
        """Let Triton unmap a region, whether or not Triton knows it or answers.

        Triton rejects this while an inference still reads the region, which may be one of a worker that was just killed.
        """
        request = service_pb2.SystemSharedMemoryUnregisterRequest(name=region)
        with suppress(TimeoutError):
            async with asyncio.timeout(_QUERY_SECONDS):
                for _ in range(_UNREGISTER_ATTEMPTS):
                    try:
                        await self._stub.SystemSharedMemoryUnregister(request, metadata=self._control_metadata)
                        break
                    except grpc.RpcError as error:
                        if not is_region_in_use(error):
                            break
                    await asyncio.sleep(_QUERY_SECONDS / _UNREGISTER_ATTEMPTS)

    async def ask(self, method: str, request: Any, seconds: float = _QUERY_SECONDS) -> Any:  # noqa: ANN401 - messages have no types
        """Make a call that may need the control key, and return its answer.

        Args:
            method: Name of the call in Triton's protocol.
            request: The message that it takes.
            seconds: How long the answer may take.

        Raises:
            TritonUnavailable: Triton does not answer in time.
            GatewayError: Triton rejected it.
        """
        return await _query(getattr(self._stub, method)(request, timeout=seconds, metadata=self._control_metadata))

    async def infer(  # noqa: PLR0913 - the parts of a request
        self,
        spec: ModelSpec,
        tensors: Sequence[NDArray[Any]],
        *,
        timeout_seconds: float,
        request_id: str = "",
        trace: TraceContext | None = None,
        slot: Slot | None = None,
        waits_for_connection: bool = False,
    ) -> InferResult:
        """Run one inference to its end, which may be up to a minute later than `timeout_seconds`. Cancelling it cancels the RPC.

        Args:
            spec: Spec of the model.
            tensors: Its input, contiguous, one for each image; files as `messages.write_bytes_element` writes them.
            timeout_seconds: How long Triton may keep it in its queue.
            request_id: Request id, for Triton's log.
            trace: The span that calls, for Triton's traces.
            slot: The registered shared memory of the first tensor, behind which the others lie, if they do. Triton reads it until
                this returns; after `Disconnected` and `Unanswered`, maybe longer.
            waits_for_connection: Whether to wait until Triton can be reached.

        Raises:
            DeadlinePassed: It waited too long in Triton's queue; `Unanswered` if Triton has lost it.
            TritonUnavailable, ModelNotReady, UnknownModel: Triton rejected the request or was not reached; `status` tells more.
            InferenceFailed, InvalidModelOutput: Triton could not run the model, or its response is not consistent.
        """
        request = infer_request(spec, tensors, timeout_seconds=timeout_seconds, request_id=request_id, slot=slot)
        metadata = None if trace is None else trace.headers
        seconds = max(0.0, timeout_seconds) + _BACKSTOP_SECONDS
        timeout = seconds if self.survives_cancel else None  # its end cancels the RPC
        channel, infer = next(self._model_infer)
        call = infer(request, timeout=timeout, metadata=metadata, wait_for_ready=waits_for_connection)
        try:
            if timeout is None and not await _ends(call, seconds):
                if channel.get_state() is grpc.ChannelConnectivity.READY:
                    self.left.add(call)
                    call.add_done_callback(self.left.discard)
                raise Unanswered("Triton did not answer in time")
            answer = await call
        except grpc.RpcError as error:
            raise from_grpc_error(error) from error
        return read_response(answer)

    @property
    def _control_metadata(self) -> tuple[tuple[str, str], ...]:
        return control_key.metadata(self._control_key_path)

    async def _watch(self, channel: grpc.aio.Channel) -> None:
        """Count the connections of a channel, and read the server's version whenever the first channel has connected."""
        is_first = channel is self._channels[0]
        while True:
            state = channel.get_state(try_to_connect=is_first)
            is_connected = state is grpc.ChannelConnectivity.READY
            self.connection += is_connected
            if is_first:
                self.server = None
            if is_first and is_connected:
                try:
                    self.server = await self.read_server()
                except GatewayError:
                    await asyncio.sleep(_QUERY_SECONDS)
                    continue
            await channel.wait_for_state_change(state)


def _open_channels(
    address: str, credentials: Credentials | None, host: str, ips: Sequence[str], connections: int
) -> list[grpc.aio.Channel]:
    """Open channels to one Triton, each with a connection of its own; they connect when they are used.

    Args:
        address: `host:port` of its gRPC endpoint.
        credentials: For TLS; None sends everything unencrypted.
        host: The host that its certificate must name; empty: that in the address.
        ips: IP addresses to connect to; none: the host in the address.
        connections: How many channels.
    """
    options = list(_OPTIONS)
    if connections > 1:  # channels to one address would share a connection
        options.append(("grpc.use_local_subchannel_pool", 1))
    if ips:  # what a certificate must name, and what proxies see, is the name
        options.append(("grpc.default_authority", address))
        port = address.rpartition(":")[2]
        address = "ipv6:" + ",".join(f"[{ip}]:{port}" if ":" in ip else f"[::ffff:{ip}]:{port}" for ip in ips)
    if credentials is None:
        return [grpc.aio.insecure_channel(address, options=options) for _ in range(connections)]
    if host:
        options.append(("grpc.ssl_target_name_override", host))
    tls = grpc.ssl_channel_credentials(credentials.roots, credentials.key, credentials.certificates)
    return [grpc.aio.secure_channel(address, tls, options=options) for _ in range(connections)]


async def _ends(call: grpc.aio.Call, seconds: float) -> bool:
    """Wait for the end of a call, without cancelling it when the time is over; return whether it has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[bool] = loop.create_future()

    def end(is_ended: bool, *_: object) -> None:  # noqa: FBT001 - a callback
        if not ended.done():
            ended.set_result(is_ended)

    call.add_done_callback(partial(end, True))  # noqa: FBT003
    timer = loop.call_later(seconds, end, False)  # noqa: FBT003
    try:
        return await ended
    except asyncio.CancelledError:
        call.cancel()
        raise
    finally:
        timer.cancel()


async def _query(call: Awaitable[Any]) -> Any:  # noqa: ANN401 - generated messages have no types
    try:
        answer = await call
    except grpc.RpcError as error:
        raise from_query_error(error) from error
    if answer is None:  # it is no message
        raise InvalidModelOutput("Triton's answer cannot be read")
    return answer
