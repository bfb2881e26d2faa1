"""Requests and responses of KServe v2 over HTTP: JSON, with tensors in it or, by the binary extension, behind it.

Source: docs/predict-api/v2/required_api.md of kserve/kserve; docs/protocol of triton-inference-server/server.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import chain
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from app.api.receiving.body import JSON_ERRORS, decode, decode_base64, view_document
from app.errors import InvalidParameter, MalformedRequest
from app.pipeline.call import MAX_DETECTIONS

BYTES = "BYTES"
"""Datatype of a tensor of files or texts."""
MAX_HEAD_BYTES = 1 << 16
"""Maximum size of the JSON in front of binary tensors; without these, the JSON is the whole body."""
_LENGTH_BYTES = 4
_MAX_DIMS = 8
_MAX_NAME = 256
# Other threads run between two pieces of long JSON.
_PIECE_BYTES, _PIECE_ELEMENTS = 1 << 16, 1 << 14
_MAX_NUMBER_BYTES = 1 << 10
_EXAMPLE = '{"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["<base64>"]}]}'
_EXPECTED = f"expected a JSON object such as {_EXAMPLE}"

_Name = Annotated[str, Meta(max_length=_MAX_NAME)]
_Fraction = Annotated[float, Meta(ge=0, le=1)]


class Parameters(msgspec.Struct, frozen=True):
    """Parameters of a request; others are ignored."""

    binary_data_output: bool = False
    """Whether outputs are binary that do not say it themselves."""
    confidence: _Fraction = 0.25
    iou: _Fraction | None = None
    max_detections: Annotated[int, Meta(ge=1, le=MAX_DETECTIONS)] = 100
    top_k: Annotated[int, Meta(ge=1)] = 5
    """Maximum number of classes of a classifier."""


class _TensorParameters(msgspec.Struct, frozen=True):
    binary_data_size: Annotated[int, Meta(ge=0)] | None = None
    binary_data: bool | None = None
    classification: msgspec.Raw = msgspec.Raw()
    shared_memory_region: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct, frozen=True):
    name: _Name
    parameters: _TensorParameters = _TensorParameters()


class _Input(msgspec.Struct, frozen=True):
    name: _Name
    datatype: _Name
    shape: Annotated[list[Annotated[int, Meta(ge=1, lt=2**31)]], Meta(min_length=1, max_length=_MAX_DIMS)]
    data: msgspec.Raw = msgspec.Raw()
    parameters: _TensorParameters = _TensorParameters()


class _Document(msgspec.Struct, frozen=True):
    inputs: Annotated[list[_Input], Meta(min_length=1, max_length=1)]
    outputs: Annotated[list[_Output], Meta(max_length=64)] = []
    id: _Name | None = None
    parameters: Parameters = Parameters()


class InferRequest(NamedTuple):
    """A request whose tensor is not decoded yet."""

    id: str | None
    parameters: Parameters
    name: str
    """Name of the input."""
    datatype: str
    shape: tuple[int, ...]
    data: msgspec.Raw
    """The elements of the tensor as a JSON list; empty if they are binary."""
    binary: memoryview
    """The binary elements, little-endian; empty if they are JSON."""
    outputs: Mapping[str, bool]
    """Names of the outputs to return, and whether they are binary; empty for all."""

    def read_file(self) -> bytes:
        """Return the only element of a tensor of files, which is base64 in JSON; its size is checked before it is copied.

        Raises:
            MalformedRequest: There are more elements, or it is not well formed.
        """
        if self.shape not in {(1,), (1, 1)}:
            raise MalformedRequest(f"the shape of an input of type {BYTES} is [1] or [1, 1]: send one image per request")
        if self.data:
            texts = decode(self.data, list[str | list[str]], 'the "data" of an image is a list of one text in base64')
            flat = list(chain.from_iterable([text] if isinstance(text, str) else text for text in texts))
            if len(flat) != 1:
                raise MalformedRequest(f'"data" has {len(flat)} elements, the shape 1')
            return decode_base64(flat[0])
        if int.from_bytes(self.binary[:_LENGTH_BYTES], "little") != len(self.binary) - _LENGTH_BYTES:
            raise MalformedRequest("a binary element is its length, four bytes little-endian, and then as many bytes")
        return bytes(self.binary[_LENGTH_BYTES:])

    def read_numbers(self, dtype: type[np.generic], count: int) -> NDArray[Any]:
        """Return all elements (count,) of a tensor of numbers; raise MalformedRequest if there are fewer or more."""
        if not self.data:
            if len(self.binary) != (nbytes := count * np.dtype(dtype).itemsize):
                raise MalformedRequest(f"the tensor has {nbytes} bytes by its shape, found {len(self.binary)}")
            return np.frombuffer(self.binary, dtype)
        text, decoder = memoryview(self.data), _number_decoder(np.dtype(dtype))
        found, rest, expected = 0, b"", f'"data" is not a list of {count} numbers of the type {self.datatype}'
        elements = np.empty(count, dtype)
        for start in range(0, len(text), _PIECE_BYTES):
            piece = rest + bytes(text[start : start + _PIECE_BYTES]).translate(None, b"[] \t\r\n")
            whole, _, rest = piece.rpartition(b",") if start + _PIECE_BYTES < len(text) else (piece, b"", b"")
            try:
                numbers = decoder.decode(b"[%b]" % whole)
            except JSON_ERRORS as error:
                raise MalformedRequest(expected) from error
            if found + len(numbers) > count or len(rest) > _MAX_NUMBER_BYTES:
                raise MalformedRequest(expected)
            elements[found : found + len(numbers)] = numbers
            found += len(numbers)
        if found != count:
            raise MalformedRequest(expected)
        return elements

    def choose(self, available: Iterable[str]) -> dict[str, bool]:
        """Return the outputs to return, and whether they are binary; raise InvalidParameter if one does not exist."""
        names = list(available)
        unknown = [name for name in self.outputs if name not in names]
        if unknown:
            raise InvalidParameter(f"there is no output {unknown[0][:64]!r}; outputs: {', '.join(names)}")
        return dict(self.outputs) or dict.fromkeys(names, self.parameters.binary_data_output)


@cache
def _number_decoder(dtype: np.dtype[Any]) -> "msgspec.json.Decoder[list[float]]":
    """Return the decoder of a JSON list of numbers that this type has, without infinity."""
    if dtype.kind == "f":
        greatest = float(np.finfo(dtype).max)
        return msgspec.json.Decoder(list[Annotated[float, Meta(ge=-greatest, le=greatest)]])
    return msgspec.json.Decoder(list[Annotated[int, Meta(ge=0, le=int(np.iinfo(dtype).max))]])


def parse_request(data: bytes, header_length: str) -> InferRequest:
    """Parse a body; `header_length` is its `Inference-Header-Content-Length`, the size of the JSON, or empty.

    Raises:
        MalformedRequest: It is no request with one input, or the sizes do not fit.
        InvalidParameter: A parameter is not supported.
    """
    nbytes = len(data)
    if header_length:
        nbytes = int(header_length) if header_length.isdecimal() and len(header_length) < _MAX_DIMS else MAX_HEAD_BYTES + 1
        if nbytes > min(MAX_HEAD_BYTES, len(data)):
            raise MalformedRequest(f"Inference-Header-Content-Length is no number up to {MAX_HEAD_BYTES} and to the body's length")
    try:
        document = msgspec.json.decode(view_document(data[:nbytes]), type=_Document)
    except JSON_ERRORS as error:
        place = str(error)[:256].rpartition(" - at ")[2].rstrip("`").lstrip("`$.") if " - at " in str(error)[:256] else ""
        raise MalformedRequest(f"{place}: not as expected; {_EXPECTED}" if place else _EXPECTED) from error
    given, binary = document.inputs[0], memoryview(data)[nbytes:]
    size = given.parameters.binary_data_size
    if given.parameters.shared_memory_region or any(output.parameters.shared_memory_region for output in document.outputs):
        raise InvalidParameter("tensors in shared memory are not supported")
    if any(output.parameters.classification for output in document.outputs):
        raise InvalidParameter("the parameter `classification` is not supported")
    if bool(given.data) == bool(binary) or size not in {None, len(binary)}:
        raise MalformedRequest("the input has either `data`, or `binary_data_size` bytes behind the JSON, and nothing follows")
    default = document.parameters.binary_data_output
    wanted = {each.name: default if (own := each.parameters.binary_data) is None else own for each in document.outputs}
    tensor = given.name, given.datatype, tuple(given.shape), given.data, binary
    return InferRequest(document.id, document.parameters, *tensor, wanted)


def encode_response(
    head: Mapping[str, str], outputs: Mapping[str, NDArray[Any]], is_binary: Mapping[str, bool]
) -> tuple[bytes, int]:
    """Encode a response with these outputs; return the body, and the size of the JSON in it, 0 if it is the whole body.

    Args:
        head: Members beside the outputs.
        outputs: Tensors by name; texts have the type `object`.
        is_binary: Whether each output to return is binary, by name.
    """
    described, parts = [], []
    for name, binary in is_binary.items():
        tensor = outputs[name]
        datatype = _datatype(tensor.dtype)
        own: dict[str, Any] = {"name": name, "datatype": datatype, "shape": tensor.shape}
        if binary:
            texts = [text.encode() for text in tensor.flat] if datatype == BYTES else []
            parts.append(b"".join(len(text).to_bytes(_LENGTH_BYTES, "little") + text for text in texts) or tensor.tobytes())
            own["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            own["data"] = msgspec.Raw(_encode_list(tensor.reshape(-1)))
        described.append(own)
    document = msgspec.json.encode({**head, "outputs": described})
    return b"".join([document, *parts]), len(document) if any(is_binary.values()) else 0


def _encode_list(elements: NDArray[Any]) -> bytes:
    starts = range(0, len(elements), _PIECE_ELEMENTS)
    return b"[%b]" % b",".join(msgspec.json.encode(elements[start : start + _PIECE_ELEMENTS].tolist())[1:-1] for start in starts)


def _datatype(dtype: np.dtype[Any]) -> str:
    """Return the protocol's name of a type."""
    name = {"f": "FP", "i": "INT", "u": "UINT"}.get(dtype.kind)
    return f"{name}{dtype.itemsize * 8}" if name else {"b": "BOOL", "O": BYTES}[dtype.kind]
