"""Requests and responses of KServe v2 over HTTP: JSON, with tensors in it or, by the binary extension, behind it."""

from collections.abc import Collection, Iterator, Mapping
from itertools import chain, islice
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from app.api.parameters.parse import Fraction, Pairs
from app.api.receiving.body import JSON_ERRORS, decode, decode_base64, view_document
from app.errors import InvalidParameter, MalformedRequest
from app.pipeline.call import MAX_DETECTIONS
from app.pipeline.tensors import Declared

BYTES = "BYTES"
_LENGTH_BYTES = 4
_MAX_LENGTH_DIGITS = 18
# Other threads run between two pieces of long JSON.
_PIECE_BYTES, _PIECE_ELEMENTS = 1 << 16, 1 << 14
_EXAMPLE = '{"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["<base64>"]}]}'
_EXPECTED = f"expected a JSON object such as {_EXAMPLE}"

_Name = Annotated[str, Meta(max_length=256)]
_Shape = Annotated[tuple[Annotated[int, Meta(ge=1, lt=2**31)], ...], Meta(min_length=1, max_length=8)]


class Parameters(msgspec.Struct, frozen=True):
    """Parameters of a request; others are ignored."""

    binary_data_output: bool = False
    confidence: Fraction = 0.25
    iou: Fraction | None = None
    max_detections: Annotated[int, Meta(ge=1, le=MAX_DETECTIONS)] = 100


class _TensorParameters(msgspec.Struct, frozen=True):
    binary_data_size: int | None = None
    binary_data: bool | None = None
    classification: msgspec.Raw = msgspec.Raw()
    shared_memory_region: msgspec.Raw = msgspec.Raw()


# Some clients send null for what a request does not have.
class _Output(msgspec.Struct, frozen=True):
    name: _Name
    parameters: _TensorParameters | None = None


class _Input(_Output, frozen=True, kw_only=True):
    datatype: _Name
    shape: _Shape
    data: msgspec.Raw = msgspec.Raw()


class _Document(msgspec.Struct, frozen=True):
    inputs: Annotated[list[_Input], Meta(min_length=1, max_length=1)]
    outputs: Annotated[list[_Output], Meta(max_length=64)] | None = None
    id: _Name | None = None
    parameters: Parameters | None = None


class InferRequest(NamedTuple):
    """A request, whose numbers have not been read yet."""

    declared: Declared
    content: bytes | msgspec.Raw | memoryview
    """The encoded image; the elements of any other tensor as JSON, or little-endian."""
    outputs: dict[str, bool]
    """Whether each chosen output is binary; empty if none is chosen."""
    chosen: Parameters
    id: dict[str, str]
    parameters: Pairs = ()

    @classmethod
    def parse(cls, data: bytes, header_length: str) -> "InferRequest":
        """Parse a body; `header_length` is the size of the JSON, or empty. Raise MalformedRequest or InvalidParameter."""
        is_number = header_length.isdecimal() and len(header_length) <= _MAX_LENGTH_DIGITS
        nbytes = int(header_length) if is_number else len(data)
        if nbytes > len(data) or (header_length and not is_number):
            raise MalformedRequest("Inference-Header-Content-Length is not a number up to the body's length")
        try:
            document = msgspec.json.decode(view_document(data[:nbytes]), type=_Document)
        except JSON_ERRORS as error:
            place = str(error)[:256].partition(" - at `$.")[2].rstrip("`")
            raise MalformedRequest(f"{place} is not as expected; {_EXPECTED}" if place else _EXPECTED) from error
        tensor, binary, chosen = document.inputs[0], memoryview(data)[nbytes:], document.parameters or Parameters()
        named = {each.name: each.parameters or _TensorParameters() for each in document.outputs or ()}
        own = tensor.parameters or _TensorParameters()
        if any(each.classification or each.shared_memory_region for each in (own, *named.values())):
            raise InvalidParameter("neither shared memory nor the parameter `classification` is supported")
        if bool(tensor.data) == bool(binary) or own.binary_data_size not in {None, len(binary)}:
            raise MalformedRequest("the input has either `data`, or `binary_data_size` bytes behind the JSON, and nothing follows")
        default = chosen.binary_data_output
        outputs = {name: default if each.binary_data is None else each.binary_data for name, each in named.items()}
        content = _read_file(tensor, binary) if tensor.datatype == BYTES else tensor.data or binary
        id_ = {} if document.id is None else {"id": document.id}
        return cls((tensor.name, tensor.datatype, tensor.shape), content, outputs, chosen, id_)

    def read_numbers(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the elements (count,) of a tensor of numbers; raise MalformedRequest if there are fewer or more."""
        expected = f"the tensor is no list of {count} numbers of type {self.declared[1]}, nor {count * dtype.itemsize} bytes"
        if isinstance(self.content, memoryview):
            if len(self.content) != count * dtype.itemsize:
                raise MalformedRequest(expected)
            return np.frombuffer(self.content, dtype)
        try:
            elements = np.fromiter(islice(chain.from_iterable(_pieces(self.content, dtype)), count + 1), dtype)
        except JSON_ERRORS as error:
            raise MalformedRequest(expected) from error
        if len(elements) != count:
            raise MalformedRequest(expected)
        return elements

    def choose(self, available: Collection[str]) -> dict[str, bool]:
        """Return the outputs to return, and whether each is binary; raise InvalidParameter if one does not exist."""
        if unknown := [name for name in self.outputs if name not in available]:
            raise InvalidParameter(f"there is no output {unknown[0][:64]!r}; outputs: {', '.join(available)}")
        return self.outputs or dict.fromkeys(available, self.chosen.binary_data_output)


def _read_file(tensor: _Input, binary: memoryview) -> bytes:
    if tensor.shape not in {(1,), (1, 1)}:
        raise MalformedRequest(f"the shape of an input of type {BYTES} is [1] or [1, 1]: send one image per request")
    if tensor.data:
        text = memoryview(bytes(tensor.data).strip(b"[] \t\r\n"))  # of a list, which may be nested
        return decode_base64(decode(text, str, f'the "data" of an image is a list of one text; {_EXPECTED}'))
    if int.from_bytes(binary[:_LENGTH_BYTES], "little") != len(binary) - _LENGTH_BYTES:
        raise MalformedRequest("a binary element is its length, four bytes little-endian, and then as many bytes")
    return bytes(binary[_LENGTH_BYTES:])


def _pieces(text: bytes | msgspec.Raw, dtype: np.dtype[Any]) -> Iterator[list[float]]:
    limits: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    kind = float if dtype.kind == "f" else int
    decoder = msgspec.json.Decoder(list[Annotated[kind, Meta(ge=kind(limits.min), le=kind(limits.max))]])  # type: ignore[valid-type]
    data, rest = memoryview(text), b""
    for start in range(0, len(data), _PIECE_BYTES):
        piece = rest + bytes(data[start : start + _PIECE_BYTES]).translate(None, b"[] \t\r\n")
        end = piece.rindex(b",") if start + _PIECE_BYTES < len(data) else len(piece)  # no number is as long as a piece
        yield decoder.decode(b"[%b]" % piece[:end])
        rest = piece[end + 1 :]


def encode_response(
    head: Mapping[str, str], outputs: Mapping[str, NDArray[Any]], is_binary: Mapping[str, bool]
) -> tuple[bytes, int]:
    """Encode the outputs that `is_binary` names, texts as `object`; return the body, and the size of JSON with more behind it."""
    described, parts = [], []
    for name, binary in is_binary.items():
        tensor = outputs[name]
        datatype = BYTES if tensor.dtype.hasobject else tensor.dtype.name.upper().replace("FLOAT", "FP")
        own: dict[str, Any] = {"name": name, "datatype": datatype, "shape": tensor.shape}
        if binary:
            elements = tensor.tobytes()
            if tensor.dtype.hasobject:
                texts = map(str.encode, tensor.flat)
                elements = b"".join(len(text).to_bytes(_LENGTH_BYTES, "little") + text for text in texts)
            own["parameters"] = {"binary_data_size": len(elements)}
            parts.append(elements)
        else:
            flat = tensor.reshape(-1)
            pieces = (flat[start : start + _PIECE_ELEMENTS].tolist() for start in range(0, flat.size, _PIECE_ELEMENTS))
            own["data"] = msgspec.Raw(b"[%b]" % b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces))
        described.append(own)
    document = msgspec.json.encode({**head, "outputs": described})
    return b"".join([document, *parts]), len(document) if parts else 0
