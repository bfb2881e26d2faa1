"""A Triton that answers as it is told, for answers that a real one gives too rarely."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from app.model.spec import ModelSpec, from_triton_config

CONFIG = {
    "name": "tiny",
    "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [32, 32, 3]}],
    "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [2, 6]}],
}
SPEC: ModelSpec = from_triton_config(CONFIG, "1")
"""Of the one model that it has, under whatever name."""


class FakeTriton(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated code has no types
    """Answers every call; tests set the attributes."""

    def __init__(self) -> None:
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        """Status and message for every inference and registration."""
        self.answer = messages.ModelInferResponse(model_name="tiny", model_version="1")
        self.version = "2.51.0"
        self.may_answer = asyncio.Event()
        """Inferences wait for it."""
        self.may_answer.set()
        self.accepts_regions = True
        self.still_read = 0
        """How often unregistering a region is refused, because an inference reads it."""
        self.requests: list[messages.ModelInferRequest] = []
        self.cancelled = 0
        """Inferences cancelled by the client."""
        self.regions: set[str] = set()
        """Names of the registered regions."""
        self.config_reads = 0

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.requests.append(request)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        parameters = request.inputs[0].parameters
        if "shared_memory_region" in parameters and parameters["shared_memory_region"].string_param not in self.regions:
            await context.abort(grpc.StatusCode.NOT_FOUND, "Unable to find shared memory region: 'nereid'")
        if self.refusal:
            await context.abort(*self.refusal)
        return self.answer

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if self.refusal:
            await context.abort(*self.refusal)
        if not self.accepts_regions:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Unable to open shared memory region")
        self.regions.add(request.name)
        return messages.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if self.still_read:
            self.still_read -= 1
            await context.abort(grpc.StatusCode.INTERNAL, f"Cannot unregister {request.name}, it is currently in use.")
        self.regions.discard(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    async def ModelMetadata(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802
        self.config_reads += 1
        return messages.ModelMetadataResponse(name=request.name, versions=["1"])

    async def ModelConfig(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802
        answer = messages.ModelConfigResponse()
        answer.config.name = request.name
        answer.config.input.add(name="image", data_type="TYPE_UINT8", dims=[32, 32, 3])
        answer.config.output.add(name="output0", data_type="TYPE_FP32", dims=[2, 6])
        return answer

    async def ServerMetadata(self, _: Any, __: Any) -> Any:  # noqa: ANN401, N802
        return messages.ServerMetadataResponse(version=self.version)

    async def RepositoryIndex(self, _: Any, __: Any) -> Any:  # noqa: ANN401, N802
        index = messages.RepositoryIndexResponse()
        for name, version, state in (("a", "1", "READY"), ("a", "2", "UNAVAILABLE"), ("b", "1", "UNAVAILABLE"), ("c", "", "")):
            index.models.add(name=name, version=version, state=state)
        return index


@asynccontextmanager
async def serving(fake: FakeTriton, port: int = 0) -> AsyncIterator[int]:
    """Serve a fake on loopback; yields the port, which the system chooses unless it is given."""
    server = grpc.aio.server()
    add_GRPCInferenceServiceServicer_to_server(fake, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    yield port
    await server.stop(None)
