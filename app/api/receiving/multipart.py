"""Read the parts of a multipart form."""

from collections.abc import Iterator
from typing import NamedTuple

from multipart import MultipartError, MultipartSegment, PushMultipartParser

from app.api.receiving.content_type import boundary_of
from app.errors import InvalidParameter, MalformedRequest

_FEED_BYTES = 1 << 20


class Part(NamedTuple):
    """A part of a form."""

    name: str
    file_name: str | None
    content: bytes

    @property
    def text(self) -> str:
        """The content if the part is text and not a file; otherwise empty. No image is ASCII without zero bytes."""
        is_text = self.file_name is None and self.content.isascii() and b"\0" not in self.content
        return self.content.decode() if is_text else ""


def read_parts(data: bytes, content_type: str, max_parts: int) -> Iterator[Part]:
    """Yield the parts of a form; raise MalformedRequest if it is not well formed, has too many parts, or one without a name."""
    name, file_name = "", None
    chunks: list[bytes] = []
    boundary = boundary_of(content_type)
    try:
        # Latin-1 accepts names in any encoding.
        with PushMultipartParser(boundary, max_segment_count=max_parts, header_charset="latin-1") as parser:
            # In pieces, because the parser copies its input.
            for at in range(0, len(data), _FEED_BYTES):
                for event in parser.parse(data[at : at + _FEED_BYTES]):
                    if isinstance(event, MultipartSegment):
                        name, file_name, chunks = event.name, event.filename, []
                        if not name:
                            raise MalformedRequest('a part has no name; expected Content-Disposition: form-data; name="image"')
                    elif event:
                        chunks.append(bytes(event))
                    else:
                        content, chunks = b"".join(chunks), []
                        if content or file_name != "":  # a browser sends a file that nobody has chosen
                            yield Part(_to_name(name), file_name and _to_name(file_name), content)
    except ValueError as error:  # includes MultipartError and UnicodeError
        # `from None`, because the log must not contain the parser's message, which quotes the body.
        raise MalformedRequest(_describe_defect(error, data, boundary, max_parts)) from None


def to_parameter(part: Part, expected: str) -> tuple[str, str]:
    """Return name and value of a parameter. Errors name the `expected` fields of images: a parameter is no file, and is text."""
    if part.file_name is not None:
        raise MalformedRequest(f"there is a file in the field {part.name[:64]!r}; expected it in {expected}", repeats_request=True)
    try:
        return part.name, part.content.decode()
    except UnicodeDecodeError as error:
        raise InvalidParameter(f"{part.name[:64]!r} is not UTF-8 text; if it is the image, its field must be {expected}") from error


def _to_name(name: str) -> str:
    try:
        return name.encode("latin-1").decode()
    except UnicodeDecodeError:
        return name


# By the parser's error message, its only distinction; its other messages are clear.
_DEFECTS = {
    "Empty boundary": 'the Content-Type header has no boundary; let the HTTP client write it: "multipart/form-data; boundary=x"',
    "Invalid line break after first boundary": "the form has line breaks of LF; they must be CR LF",
    "Invalid line break in segment header": "the headers of a part end in LF; they must end in CR LF, and an empty line",
    "Maximum segment count exceeded": "the form has too many parts; the maximum is {max_parts}",
}
_END = "Unexpected end of multipart stream"


def _describe_defect(error: ValueError, data: bytes, boundary: str, max_parts: int) -> str:
    """Describe an error of the parser without quoting the body."""
    text = str(error.args[0]) if isinstance(error, MultipartError) else ""
    if text.startswith(_END):
        if not data.startswith(f"--{boundary}".encode()) and f"\n--{boundary}".encode() not in data:
            return "the boundary of the Content-Type header does not occur in the body; let the HTTP client write both"
        return "the form ends before its last boundary, which has two hyphens at its end: it is incomplete"
    default = f"the form is not well formed: {text[:1].lower()}{text[1:]}" if text else "the form is not well formed"
    return _DEFECTS.get(text, default.replace("segment", "part")).format(max_parts=max_parts)
