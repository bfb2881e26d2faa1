"""Requests and responses of KServe v2 over HTTP: JSON, with tensors in it or, by the binary extension, behind it."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from app.api.receiving.body import JSON_ERRORS, decode, decode_base64, view_document
from app.errors import InvalidParameter, MalformedRequest
from app.pipeline.call import MAX_DETECTIONS

BYTES = "BYTES"
"""Datatype of files and texts."""
MAX_HEAD_BYTES = 1 << 16
"""Maximum size of JSON with a binary tensor behind it."""
_LENGTH_BYTES = 4
_MAX_LENGTH_DIGITS = 9
# Other threads run between two pieces of long JSON.
_PIECE_BYTES, _PIECE_ELEMENTS, _MAX_NUMBER_BYTES = 1 << 16, 1 << 14, 1 << 10
_EXAMPLE = '{"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["<base64>"]}]}'
_EXPECTED = f"expected a JSON object such as {_EXAMPLE}"

_Name = Annotated[str, Meta(max_length=256)]
_Fraction = Annotated[float, Meta(ge=0, le=1)]
_Shape = Annotated[list[Annotated[int, Meta(ge=1, lt=2**31)]], Meta(min_length=1, max_length=8)]


class Parameters(msgspec.Struct, frozen=True):
    """Parameters of a request; others are ignored."""

    binary_data_output: bool = False
    confidence: _Fraction = 0.25
    iou: _Fraction | None = None
    max_detections: Annotated[int, Meta(ge=1, le=MAX_DETECTIONS)] = 100
    """For a classifier, the maximum number of classes."""


class _TensorParameters(msgspec.Struct, frozen=True):
    binary_data_size: int | None = None
    binary_data: bool | None = None
    classification: msgspec.Raw = msgspec.Raw()
    shared_memory_region: msgspec.Raw = msgspec.Raw()


class _Output(msgspec.Struct, frozen=True):
    name: _Name
    parameters: _TensorParameters = _TensorParameters()


class _Input(_Output, frozen=True, kw_only=True):
    datatype: _Name
    shape: _Shape
    data: msgspec.Raw = msgspec.Raw()


class _Document(msgspec.Struct, frozen=True):
    inputs: Annotated[list[_Input], Meta(min_length=1, max_length=1)]
    outputs: Annotated[list[_Output], Meta(max_length=64)] = []
    id: _Name | None = None
    parameters: Parameters = Parameters()


class InferRequest(NamedTuple):
    """A request whose tensor has not been read yet."""

    document: _Document
    binary: memoryview
    """The elements of the tensor, little-endian; empty if they are JSON."""

    @property
    def tensor(self) -> _Input:
        """The description of the tensor."""
        return self.document.inputs[0]

    def read_file(self) -> bytes:
        """Return the only element of a tensor of files, in JSON as base64; raise MalformedRequest if there is no single one."""
        tensor = self.tensor
        if tensor.shape not in ([1], [1, 1]):
            raise MalformedRequest(f"the shape of an input of type {BYTES} is [1] or [1, 1]: send one image per request")
        if not tensor.data:
            if int.from_bytes(self.binary[:_LENGTH_BYTES], "little") != len(self.binary) - _LENGTH_BYTES:
                raise MalformedRequest("a binary element is its length, four bytes little-endian, and then as many bytes")
            return bytes(self.binary[_LENGTH_BYTES:])
        text = memoryview(bytes(tensor.data).strip(b"[] \t\r\n"))  # of a list, which may be nested
        return decode_base64(decode(text, str, f'the "data" of an image is a list of one text; {_EXPECTED}'))

    def read_numbers(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        """Return the elements (count,) of a tensor of numbers; raise MalformedRequest if there are fewer or more."""
        data, nbytes = memoryview(self.tensor.data), count * dtype.itemsize
        if not data:
            if len(self.binary) != nbytes:
                raise MalformedRequest(f"the tensor has {nbytes} bytes by its shape, found {len(self.binary)}")
            return np.frombuffer(self.binary, dtype)
        found, rest, expected = 0, b"", f'the "data" is no list of {count} numbers of type {self.tensor.datatype}'
        if len(data) <= 2 * count:  # digits and commas
            raise MalformedRequest(expected)
        elements, decoder = np.empty(count, dtype), _number_decoder(dtype)
        for end in range(_PIECE_BYTES, len(data) + _PIECE_BYTES, _PIECE_BYTES):
            piece = rest + bytes(data[end - _PIECE_BYTES : end]).translate(None, b"[] \t\r\n")
            whole, _, rest = piece.rpartition(b",") if end < len(data) else (piece, b"", b"")
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
        """Return the outputs to return, and whether each is binary; raise InvalidParameter if one does not exist."""
        names, default = list(available), self.document.parameters.binary_data_output
        wanted = {each.name: default if (own := each.parameters.binary_data) is None else own for each in self.document.outputs}
        if unknown := [name for name in wanted if name not in names]:
            raise InvalidParameter(f"there is no output {unknown[0][:64]!r}; outputs: {', '.join(names)}")
        return wanted or dict.fromkeys(names, default)


@cache
def _number_decoder(dtype: np.dtype[Any]) -> "msgspec.json.Decoder[list[float]]":
    """Return the decoder of a JSON list of finite numbers that this type has."""
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
    nbytes = int(header_length) if header_length.isdecimal() and len(header_length) <= _MAX_LENGTH_DIGITS else len(data)
    if header_length and (str(nbytes) != header_length or nbytes > min(MAX_HEAD_BYTES, len(data))):
        raise MalformedRequest(f"Inference-Header-Content-Length is not a number up to {MAX_HEAD_BYTES} or the body's length")
    try:
        document = msgspec.json.decode(view_document(data[:nbytes]), type=_Document)
    except JSON_ERRORS as error:
        place = str(error)[:256].partition(" - at `$.")[2].rstrip("`")
        raise MalformedRequest(f"{place} is not as expected; {_EXPECTED}" if place else _EXPECTED) from error
    tensor, binary = document.inputs[0], memoryview(data)[nbytes:]
    if any(each.parameters.shared_memory_region for each in (tensor, *document.outputs)):
        raise InvalidParameter("tensors in shared memory are not supported")
    if any(output.parameters.classification for output in document.outputs):
        raise InvalidParameter("the parameter `classification` is not supported")
    if bool(tensor.data) == bool(binary) or tensor.parameters.binary_data_size not in {None, len(binary)}:
        raise MalformedRequest("the input has either `data`, or `binary_data_size` bytes behind the JSON, and nothing follows")
    return InferRequest(document, binary)


def encode_response(
    head: Mapping[str, str], outputs: Mapping[str, NDArray[Any]], is_binary: Mapping[str, bool]
) -> tuple[bytes, int]:
    """Encode the outputs that `is_binary` names, texts as `object`; return the body, and the size of JSON with more behind it.

    `head` has the other members of the JSON object.
    """
    described, parts = [], []
    for name, binary in is_binary.items():
        tensor = outputs[name]
        kind = {"f": "FP", "i": "INT", "u": "UINT"}.get(tensor.dtype.kind)
        datatype = f"{kind}{tensor.itemsize * 8}" if kind else {"b": "BOOL", "O": BYTES}[tensor.dtype.kind]
        own: dict[str, Any] = {"name": name, "datatype": datatype, "shape": tensor.shape}
        if binary:
            texts = [text.encode() for text in tensor.flat] if datatype == BYTES else None
            elements = tensor.tobytes() if texts is None else b"".join(len(t).to_bytes(_LENGTH_BYTES, "little") + t for t in texts)
            own["parameters"] = {"binary_data_size": len(elements)}
            parts.append(elements)
        else:
            flat = tensor.reshape(-1)
            pieces = (flat[start : start + _PIECE_ELEMENTS].tolist() for start in range(0, flat.size, _PIECE_ELEMENTS))
            own["data"] = msgspec.Raw(b"[%b]" % b",".join(msgspec.json.encode(piece)[1:-1] for piece in pieces))
        described.append(own)
    document = msgspec.json.encode({**head, "outputs": described})
    return b"".join([document, *parts]), len(document) if parts else 0
