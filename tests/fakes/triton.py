"""A Triton that answers as it is told, for answers that a real one gives too rarely."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import grpc
import numpy as np
from google.protobuf.json_format import ParseDict
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server
from tritonclient.utils import np_to_triton_dtype

from app.model.spec import ModelSpec, from_triton_config

CONFIG: dict[str, Any] = {
    "name": "tiny",
    "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [32, 32, 3]}],
    "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [2, 6]}],
}
SPEC: ModelSpec = from_triton_config(CONFIG, "1")
"""Of the one model that it has, under whatever name."""
Refusal = tuple[grpc.StatusCode, str]
GONE = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
NOT_LOADED = grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"
DOWN = grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"


def config_with(**parameters: str) -> dict[str, Any]:
    return {**CONFIG, "parameters": {name: {"string_value": text} for name, text in parameters.items()}}


class FakeTriton(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated code has no types
    """Answers every call; tests set the attributes."""

    model_refusal: Refusal | None = None
    """Status and message for every question about a model; the index lists what it always does."""
    load_refusal: Refusal | None = None
    """Status and message for everything that it is told to load."""

    knows_picture = False
    """Whether it answers questions about the golden picture, and about the unit of its boxes."""

    def __init__(self) -> None:
        self.url = ""
        """`host:port`, once it is served."""
        self.refusal: Refusal | None = None
        """Status and message for every inference and registration."""
        self.next_refusals: list[Refusal | None] = []
        """The same for the next inferences, one each; None for one that is answered."""
        self.query_refusal: Refusal | None = None
        """Status and message for every question about the server and its models."""
        # Without a version, it gets that which was asked for, or the newest.
        self.answer = messages.ModelInferResponse(model_name="tiny")
        self.config = CONFIG
        """Of every model, but for its name."""
        self.model_versions = ["1"]
        self.is_model_ready = True
        self.version = "2.51.0"
        self.extensions: list[str] = []
        self.may_answer = asyncio.Event()
        """Inferences wait for it."""
        self.may_answer.set()
        self.held: set[str] | None = None
        """Ids of those that do, if not all."""
        self.may_tell = asyncio.Event()
        """Questions about the server and its models wait for it."""
        self.may_tell.set()
        self.requests: list[messages.ModelInferRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.cancelled = 0
        self.running = 0
        self.most_running = 0
        self.regions: set[str] = set()
        """Names of the registered regions."""
        self.keys: dict[str, str] = {}
        """Keys of the regions, which are the names of their files; of those that the test has registered itself, if it matters."""
        self.statistics = messages.ModelStatisticsResponse()
        """Of all models."""
        self.index = [
            ("a", "1", "READY", ""),
            ("a", "2", "UNAVAILABLE", ""),
            ("b", "1", "UNAVAILABLE", "no weights"),
            ("c", "", "", ""),
        ]
        """Name, version, state and reason of each entry of the model repository."""
        self.told: list[str] = []
        """What to load and to unload."""
        self.read_configs: list[str] = []  # names of models, once for each time
        self.server_reads = 0

    @property
    def config_reads(self) -> int:
        return len(self.read_configs)

    def find_nothing(self) -> Self:
        """Answer with two rows without an object; return itself."""
        self.answer = infer_response(output0=np.zeros((2, 6), np.float32))
        return self

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if request.id == "golden" and not self.knows_picture:  # as if it did not have the model
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Request for unknown model")
        if request.id == "unit" and not self.knows_picture:  # which tells nothing
            return messages.ModelInferResponse(model_name=request.model_name)
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            if self.held is None or request.id in self.held:
                await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        refusal = self.next_refusals.pop(0) if self.next_refusals else self.refusal
        parameters = request.inputs[0].parameters
        if "shared_memory_region" in parameters and parameters["shared_memory_region"].string_param not in self.regions:
            await context.abort(grpc.StatusCode.NOT_FOUND, "Unable to find shared memory region: 'nereid'")
        if refusal:
            await context.abort(*refusal)
        newest = max((version for version in self.model_versions if version.isdigit()), key=int, default="")
        version = self.answer.model_version or request.model_version or newest
        return messages.ModelInferResponse(
            model_name=self.answer.model_name,
            model_version=version,
            outputs=self.answer.outputs,
            raw_output_contents=self.answer.raw_output_contents,
        )

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if self.refusal:
            await context.abort(*self.refusal)
        if request.name in self.regions:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, f"shared memory region '{request.name}' already in manager")
        self.regions.add(request.name)
        self.keys[request.name] = request.key
        return messages.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802
        self.regions.discard(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    async def SystemSharedMemoryStatus(self, _: Any, __: Any) -> Any:  # noqa: ANN401, N802
        status = messages.SystemSharedMemoryStatusResponse()
        for name in self.regions:
            status.regions[name].name = name
            status.regions[name].key = self.keys.get(name, "")
        return status

    async def ServerMetadata(self, _: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.server_reads += 1
        await self._refuse_query(context)
        return messages.ServerMetadataResponse(version=self.version, extensions=self.extensions)

    async def ModelReady(self, _: Any, context: Any) -> Any:  # noqa: ANN401, N802
        await self._refuse_query(context)
        return messages.ModelReadyResponse(ready=self.is_model_ready)

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.read_configs.append(request.name)
        await self._refuse_query(context)
        if self.model_refusal:
            await context.abort(*self.model_refusal)
        return messages.ModelMetadataResponse(name=request.name, versions=self.model_versions)

    async def ModelConfig(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        await self._refuse_query(context)
        return ParseDict({"config": {**self.config, "name": request.name}}, messages.ModelConfigResponse())

    async def ModelStatistics(self, _: Any, context: Any) -> Any:  # noqa: ANN401, N802
        await self._refuse_query(context)
        return self.statistics

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.told.append(f"load {request.model_name}")
        if self.load_refusal:
            await context.abort(*self.load_refusal)
        return messages.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802
        self.told.append(f"unload {request.model_name}")
        return messages.RepositoryModelUnloadResponse()

    async def RepositoryIndex(self, _: Any, context: Any) -> Any:  # noqa: ANN401, N802
        await self._refuse_query(context)
        index = messages.RepositoryIndexResponse()
        for name, version, state, reason in self.index:
            index.models.add(name=name, version=version, state=state, reason=reason)
        return index

    async def _refuse_query(self, context: Any) -> None:  # noqa: ANN401
        await self.may_tell.wait()
        if self.query_refusal:
            await context.abort(*self.query_refusal)


class LoadingTriton(FakeTriton):
    """Loads and unloads models, each as long as a test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.index = [("default", "1", "READY", "")]
        self.may_load = asyncio.Event()
        self.may_load.set()

    @property
    def loaded(self) -> set[str]:
        return {name for name, _, state, _ in self.index if state == "READY"}

    async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if request.name not in self.loaded:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        return await super().ModelMetadata(request, context)

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if request.model_name not in self.loaded:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"Request for unknown model: '{request.model_name}' is not found")
        return await super().ModelInfer(request, context)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        answer = await super().RepositoryModelLoad(request, context)
        await self.may_load.wait()
        self.index.append((request.model_name, "1", "READY", ""))
        return answer

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        name = request.model_name
        self.index = [(name, "1", "UNLOADING", "") if entry[0] == name else entry for entry in self.index]
        asyncio.get_running_loop().call_later(0.02, self._end_unloading, name)
        return await super().RepositoryModelUnload(request, context)

    def _end_unloading(self, name: str) -> None:
        self.index = [entry for entry in self.index if entry[0] != name]


def infer_response(**outputs: NDArray[Any]) -> messages.ModelInferResponse:
    response = messages.ModelInferResponse(model_name="tiny")
    for name, tensor in outputs.items():
        response.outputs.add(name=name, datatype=np_to_triton_dtype(tensor.dtype), shape=tensor.shape)
        response.raw_output_contents.append(np.ascontiguousarray(tensor).tobytes())
    return response


# As in Triton, messages may have any size.
_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@asynccontextmanager
async def serving(
    fake: FakeTriton, port: int = 0, tls: grpc.ServerCredentials | None = None, address: str = ""
) -> AsyncIterator[int]:
    """Serve a fake at an address, or else on loopback; yields the port, which the system chooses unless it is given."""
    server = grpc.aio.server(options=_OPTIONS)
    add_GRPCInferenceServiceServicer_to_server(fake, server)
    address = address or f"127.0.0.1:{port}"
    port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    fake.url = f"127.0.0.1:{port}"
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)
