"""Calls to one Triton from a program without an event loop."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app.model.reference import split_reference
from app.model.spec import ModelSpec, from_triton_config
from app.triton.client import MODEL_INFER, OPTIONS
from app.triton.credentials import Credentials
from app.triton.messages import infer_request
from app.triton.status import NoReply, from_query_error

_QUERY_SECONDS = 5.0


class BlockingClient:
    """Calls one Triton, whose process may be replaced by another one meanwhile. It may be used in any thread."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """Prepare a connection to an address in gRPC's form, such as `unix:/path`; it is made by the first call."""
        tls = credentials and grpc.ssl_channel_credentials(credentials.roots, credentials.key, credentials.certificates)
        self._channel = grpc.secure_channel(address, tls, OPTIONS) if tls else grpc.insecure_channel(address, OPTIONS)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._left: list[grpc.Future] = []
        """Inferences that were not answered in time. Without a reference, gRPC would cancel them, which may crash Triton."""

    def is_ready(self, model: str) -> bool:
        """Return whether a model is ready; raises GatewayError if Triton does not answer."""
        return bool(self.ask("ModelReady", name=model).ready)

    def read_spec(self, model: str) -> ModelSpec:
        """Return the spec of a model, by reference; of a name alone, without a version."""
        name, version = split_reference(model)
        config = self.ask("ModelConfig", name=name, version=version).config
        return from_triton_config(MessageToDict(config, preserving_proto_field_name=True), version)

    def read_speeds(self) -> dict[str, float]:
        """Return the mean time of a batch in each model that has run, in milliseconds."""
        counts, times = Counter[str](), Counter[str]()
        for model in self.ask("ModelStatistics").model_stats:  # a version each
            counts[model.name] += model.inference_stats.compute_infer.count
            times[model.name] += model.inference_stats.compute_infer.ns
        return {name: times[name] / count / 1e6 for name, count in counts.items() if count}

    def ask(self, method: str, seconds: float | None = None, **fields: Any) -> Any:  # noqa: ANN401 - messages have no types
        """Make the RPC with this name and these fields of its request; return the response message, or raise GatewayError."""
        request = getattr(service_pb2, f"{method}Request")(**fields)
        with _translated_errors():
            return getattr(self._stub, method)(request, timeout=_QUERY_SECONDS if seconds is None else seconds)

    def infer(self, spec: ModelSpec, tensor: NDArray[Any], seconds: float) -> dict[str, bytes]:
        """Run one inference with a contiguous tensor of one image, which goes on after `seconds`; return the outputs by name."""
        request = infer_request(spec, [tensor], timeout_seconds=seconds, request_id="", slot=None)
        infer = self._channel.unary_unary(MODEL_INFER, response_deserializer=service_pb2.ModelInferResponse.FromString)
        with _translated_errors():
            call = infer.future(request)
            self._left = [left for left in self._left if not left.done()] + [call]
            answer = call.result(seconds)
        return {output.name: content for output, content in zip(answer.outputs, answer.raw_output_contents, strict=False)}


@contextmanager
def _translated_errors() -> Iterator[None]:
    try:
        yield
    except grpc.FutureTimeoutError as error:
        raise NoReply("Triton did not answer in time") from error
    except grpc.RpcError as error:
        raise from_query_error(error) from error
