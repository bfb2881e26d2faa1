"""Calls to one Triton from a program without an event loop."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from app.errors import TritonUnavailable
from app.model.spec import ModelSpec, from_triton_config
from app.triton.client import MODEL_INFER, OPTIONS
from app.triton.messages import infer_request
from app.triton.status import NoReply, from_query_error

_QUERY_SECONDS = 5.0


class BlockingClient:
    """Calls one Triton. It may be used in any thread."""

    def __init__(self, address: str) -> None:
        """Prepare a connection to an address in gRPC's form, such as `unix:/path`; it is made by the first call."""
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._model_infer = self._channel.unary_unary(MODEL_INFER, response_deserializer=service_pb2.ModelInferResponse.FromString)
        self._left: list[grpc.Future] = []
        """Inferences that were not answered in time. Without a reference, gRPC would cancel them, which may crash Triton."""

    def close(self) -> None:
        """Close the connection, after the end of its Triton; calls in progress fail."""
        self._channel.close()

    def is_ready(self, model: str) -> bool:
        """Return whether a model is ready.

        Raises:
            TritonUnavailable: Triton does not answer.
            GatewayError: Triton rejects the request.
        """
        with _translated_errors():
            request = service_pb2.ModelReadyRequest(name=model)
            return bool(self._stub.ModelReady(request, timeout=_QUERY_SECONDS).ready)

    def read_spec(self, model: str) -> ModelSpec:
        """Return the spec of a model, without a version.

        Raises:
            UnsupportedModel: The gateway does not support the model.
            GatewayError: Triton does not answer, or does not have the model.
        """
        with _translated_errors():
            answer = self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=model), timeout=_QUERY_SECONDS)
        return from_triton_config(MessageToDict(answer.config, preserving_proto_field_name=True), "")

    def infer(self, spec: ModelSpec, tensor: NDArray[Any], seconds: float) -> dict[str, bytes]:
        """Run one inference.

        Args:
            spec: Spec of the model.
            tensor: Its input for one image, contiguous.
            seconds: Time limit; the inference goes on after it.

        Returns:
            The content of the outputs, by name.

        Raises:
            GatewayError: Triton did not answer in time, or rejected the request; see `status`.
        """
        request = infer_request(spec, [tensor], timeout_seconds=seconds, request_id="", slot=None)
        with _translated_errors():
            call = self._model_infer.future(request)
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
    except (grpc.FutureCancelledError, ValueError) as error:  # another thread has closed the channel
        raise TritonUnavailable("the connection was closed") from error
