"""The formats of each task, and the choice of one by the parameter `format` or the header `Accept`."""

from typing import TYPE_CHECKING, Literal

from app.api.answering import coco_results, drawn, native
from app.api.answering.accept import negotiate
from app.api.answering.format import Format

# The most frequent headers, which need no parsing.
_USUAL = {b"", b"*/*", b"application/json", b"application/json, */*", b"application/json, text/plain, */*"}


class Formats:
    """The formats of one kind of result; the first one is the default."""

    def __init__(self, *formats: Format) -> None:
        self._default = formats[0]
        self._by_name = {format_.name: format_ for format_ in formats}
        self._by_type = {media_type: format_ for format_ in formats for media_type in format_.media_types}

    @property
    def names(self) -> tuple[str, ...]:
        """The values of the parameter `format`."""
        return tuple(self._by_name)

    @property
    def media_types(self) -> tuple[str, ...]:
        """The media types that `Accept` can select."""
        return tuple(self._by_type)

    def choose(self, name: str | None, accept: bytes) -> Format:
        """Choose the format of a result.

        Args:
            name: The value of the parameter `format`, which takes precedence over `Accept`; None if absent.
            accept: The `Accept` header; empty if absent.

        Raises:
            NotAcceptable: The header allows none of the media types.
        """
        if name is not None:
            return self._by_name[name]
        if accept in _USUAL:
            return self._default
        return self._by_type[negotiate(accept, self.media_types)]


DETECTIONS = Formats(native.JSON, drawn.IMAGE, drawn.IMAGE_AND_JSON, coco_results.COCO_RESULTS)
CLASSIFICATIONS = Formats(native.CLASSES_JSON)

if TYPE_CHECKING:
    FormatName = str
    ClassesFormatName = str
else:
    FormatName = Literal[DETECTIONS.names]
    ClassesFormatName = Literal[CLASSIFICATIONS.names]
"""Name of a format of classifications; `FormatName` names one of detections."""
