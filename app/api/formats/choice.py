"""All formats, and the choice of one for a request."""

from typing import TYPE_CHECKING, Literal

from app.api.formats import coco_results, drawn, native
from app.api.formats.accept import best
from app.api.formats.answer import Format
from app.errors import NotAcceptable

FORMATS = (native.JSON, drawn.IMAGE, drawn.IMAGE_AND_JSON, coco_results.COCO_RESULTS)
"""All formats; the first one is the default."""

if TYPE_CHECKING:
    FormatName = str
else:
    FormatName = Literal[tuple(format_.name for format_ in FORMATS)]
"""Name of a format."""

_BY_NAME = {format_.name: format_ for format_ in FORMATS}
_BY_TYPE = {media_type: format_ for format_ in FORMATS for media_type in format_.media_types}
MEDIA_TYPES = tuple(_BY_TYPE)
"""All types that `Accept` can ask for."""
# What most programs send, which is not worth parsing.
_USUAL = {b"", b"*/*", b"application/json", b"application/json, */*", b"application/json, text/plain, */*"}


def choose(name: FormatName | None, accept: bytes) -> Format:
    """Choose the format of a result.

    Args:
        name: What the parameter `format` says, which counts more than `Accept`; None if it is not given.
        accept: The `Accept` header; empty if there is none.

    Raises:
        NotAcceptable: The header allows no type that there is.
    """
    if name is not None:
        return _BY_NAME[name]
    if accept in _USUAL:
        return FORMATS[0]
    media_type = best(accept, MEDIA_TYPES)
    if media_type is None:
        raise NotAcceptable(f"Accept allows none of {', '.join(MEDIA_TYPES)}; without the header the result is JSON")
    return _BY_TYPE[media_type]
