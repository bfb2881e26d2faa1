"""A Triton whose answers become wrong: a proxy in front of one that is well."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import grpc
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2 as messages

from app.model.spec import OUTPUT_DTYPES
from app.triton.client import MODEL_INFER, OPTIONS

Sickness = Literal["errors", "zeros", "shuffled", "scaled"]
SICKNESSES: tuple[Sickness, ...] = ("errors", "zeros", "shuffled", "scaled")
_ERROR = "failed to perform CUDA copy: an illegal memory access was encountered"


class SickTriton(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """Passes all calls on; tests set the attributes."""

    def __init__(self) -> None:
        self.url = ""
        """`host:port`, once it is served."""
        self.sickness: Sickness | None = None
        self.models: set[str] = set()
        """Those that are sick; all if empty."""
        self.good_calls = 0
        """Inferences that are answered as they should before it becomes sick."""
        self.inferences: Counter[str] = Counter()
        """Of each model, without those of the golden picture."""
        self.questions: Counter[str] = Counter()
        """Those of the golden picture."""
        self.up: Any = None

    def service(self, details: Any) -> Any:  # noqa: ANN401
        """Return the handler of any call."""

        async def call(request: bytes, context: Any) -> bytes:  # noqa: ANN401
            metadata = [pair for pair in context.invocation_metadata() if not pair[0].startswith(("user-agent", "grpc-"))]
            asked = messages.ModelInferRequest.FromString(request) if details.method == MODEL_INFER else None
            if asked is not None and asked.id == "golden":
                self.questions[asked.model_name] += 1
            elif asked is not None and asked.id != "probe":
                self.inferences[asked.model_name] += 1
                self.good_calls -= 1
            is_sick = asked is not None and self.good_calls < 0 and (not self.models or asked.model_name in self.models)
            if is_sick and self.sickness == "errors":
                await context.abort(grpc.StatusCode.INTERNAL, _ERROR)
            answer = b""
            try:
                answer = await self.up.unary_unary(details.method)(request, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                await context.abort(error.code(), error.details())
            return _spoil(answer, self.sickness) if is_sick and self.sickness else answer

        return grpc.unary_unary_rpc_method_handler(call)


@asynccontextmanager
async def sick(address: str) -> AsyncIterator[SickTriton]:
    """Serve a proxy of the Triton at an address, in this event loop."""
    proxy = SickTriton()
    async with grpc.aio.insecure_channel(address, options=OPTIONS) as proxy.up:
        server = grpc.aio.server(options=OPTIONS)
        server.add_generic_rpc_handlers((proxy,))
        proxy.url = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield proxy
        finally:
            await server.stop(None)


def _spoil(answer: bytes, sickness: Sickness) -> bytes:
    message = messages.ModelInferResponse.FromString(answer)
    for index, output in enumerate(message.outputs):
        tensor = np.frombuffer(message.raw_output_contents[index], OUTPUT_DTYPES[output.datatype])
        message.raw_output_contents[index] = _change(tensor, sickness, is_box=not output.name.startswith("det_scores")).tobytes()
    return bytes(message.SerializeToString())


def _change(tensor: NDArray[Any], sickness: Sickness, *, is_box: bool) -> NDArray[Any]:
    if sickness == "zeros":
        return np.zeros_like(tensor)
    if not is_box or tensor.dtype.kind != "f":
        return tensor
    return np.roll(tensor, 1 + tensor.size // 2) if sickness == "shuffled" else tensor * tensor.dtype.type(1.5)
