"""Read `Accept` headers."""

import re
from collections.abc import Sequence

from app.errors import NotAcceptable

# More than any program sends.
_MAX_RANGES = 50
_RANGE = re.compile(r"\s*([\w!#$&^.+*-]+/[\w!#$&^.+*-]+)\s*((?:;[^;]*)*)", re.ASCII)
_QUALITY = re.compile(r";\s*q\s*=\s*(0(?:\.\d{0,3})?|1(?:\.0{0,3})?)\s*(?:;|$)", re.ASCII | re.IGNORECASE)


def best(accept: bytes, media_types: Sequence[str]) -> str | None:
    """Return the media type that a caller prefers.

    Args:
        accept: The header. A header without any valid media type accepts all types.
        media_types: The available types, in lower case. The first one wins if the caller prefers several equally.

    Returns:
        One of `media_types`; None if the caller accepts none of them.
    """
    qualities = _qualities(accept)
    if not qualities:
        return media_types[0]
    found = {media_type: _quality_of(media_type, qualities) for media_type in media_types}
    chosen = max(found, key=lambda media_type: found[media_type])
    return chosen if found[chosen] > 0 else None


def negotiate(accept: bytes, media_types: Sequence[str]) -> str:
    """Return the media type that a caller prefers; arguments as for `best`.

    Raises:
        NotAcceptable: The caller accepts none of them.
    """
    media_type = best(accept, media_types)
    if media_type is None:
        raise NotAcceptable(f"Accept allows none of {', '.join(media_types)}; without the header the result is JSON")
    return media_type


def _qualities(accept: bytes) -> dict[str, float]:
    """Return the quality, 0 to 1, of each media type or range."""
    qualities = {}
    for part in accept.decode("latin-1").lower().split(",", _MAX_RANGES)[:_MAX_RANGES]:
        if found := _RANGE.fullmatch(part):
            quality = _QUALITY.search(found[2])
            qualities[found[1]] = float(quality[1]) if quality else 1.0
    return qualities


def _quality_of(media_type: str, qualities: dict[str, float]) -> float:
    """Return the quality of a type, which is the quality of the most specific matching range."""
    ranges = media_type, media_type.partition("/")[0] + "/*", "*/*"
    return next((qualities[name] for name in ranges if name in qualities), 0.0)
