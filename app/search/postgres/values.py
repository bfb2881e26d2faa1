"""Values on their way into the database, checked; and words and grams of texts."""

import json
import re
import unicodedata
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeVar
from uuid import UUID

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidParameter, UnknownRecord

_MAX_METADATA_BYTES = 16 * 1024
_MAX_DEPTH = 8
_MAX_NAME = 512
_IDEOGRAPHS = r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]+"
_NUL = re.compile(r"(?<!\\)(\\\\)*\\u0000")
T = TypeVar("T", bound=msgspec.Struct)
_WORDS = re.compile(rf"({_IDEOGRAPHS})|((?:(?!{_IDEOGRAPHS})[^\W_])+)")


def check_text(text: str, what: str, most: int = _MAX_NAME) -> str:
    """Return a text that PostgreSQL can keep; raise InvalidParameter for another one."""
    if len(text) > most:
        raise InvalidParameter(f"{what} may have at most {most} characters")
    if "\0" in text or any("\ud800" <= character <= "\udfff" for character in text):
        raise InvalidParameter(f"{what} contains NUL or half a character")
    return text


def check_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metadata that PostgreSQL can keep; raise InvalidParameter for other ones."""
    try:
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidParameter("metadata must be JSON, without NaN, infinity or half a character") from error
    if size > _MAX_METADATA_BYTES:
        raise InvalidParameter(f"metadata may have at most {_MAX_METADATA_BYTES} bytes of JSON")
    if _depth(metadata) > _MAX_DEPTH:
        raise InvalidParameter(f"metadata may be nested {_MAX_DEPTH} deep")
    if _NUL.search(text):
        raise InvalidParameter("metadata contains NUL")
    return metadata


def _depth(value: object) -> int:
    if isinstance(value, Mapping):
        value = list(value.values())
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list | tuple) else 0


def check_vector(values: NDArray[np.float32], dimensions: int) -> NDArray[np.float32]:
    """Return a vector that can be searched; raise InvalidParameter for another one."""
    if values.shape != (dimensions,):
        raise InvalidParameter(f"The vectors of this index have {dimensions} numbers; got {list(values.shape)}")
    if not (np.isfinite(values).all() and values.any()):
        raise InvalidParameter("A vector must be finite, and not zero")
    return values


def to_uuid(record_id: str, what: str) -> UUID:
    """Return the id of a record; raise UnknownRecord if there can be none of this id."""
    try:
        return UUID(record_id)
    except ValueError:
        raise UnknownRecord(f"There is no such {what}") from None


def record(kind: type[T], row: Any, **others: object) -> T:  # noqa: ANN401 - asyncpg's record
    """Return a record from a row with columns of its fields' names, and from other fields."""
    values = {name: str(value) if isinstance(value, UUID) else value for name, value in row.items()} | others
    return kind(**{name: values[name] for name in kind.__struct_fields__ if name in values})


def folded(text: str) -> str:
    """Return a text as it is compared: in one form of Unicode, without case."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def grams_of(text: str) -> set[str]:
    """Return the trigrams of words, with two blanks before and one behind; of Chinese, Japanese, Korean characters and pairs."""
    grams: set[str] = set()
    for ideographs, word in _WORDS.findall(folded(text)):
        grams.update(ideographs, map("".join, pairwise(ideographs)))
        if word:
            padded = f"  {word} "
            grams.update(padded[start : start + 3] for start in range(len(padded) - 2))
    return grams


def jaccard(one: set[str], other: set[str]) -> float:
    """Return how alike two sets are, 0 to 1."""
    return len(one & other) / (len(one | other) or 1)
