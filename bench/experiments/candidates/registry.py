"""The candidates by name. It does not import them, because each may need a separate environment."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

Step = Callable[[Any], Any]
"""Takes the result of the previous step; the first step takes the bytes of an image."""

CANDIDATES = {
    "nereid": "nereid:inline_steps",
    "nereid_shm": "nereid:shared_steps",
    "opencv": "libraries:opencv_steps",
    "pillow": "libraries:pillow_steps",
    "reference": "reference:reference_steps",
}
"""Module and function of each."""
NEREID = ("nereid", "nereid_shm")
"""Candidates that measure Nereid's own code."""


def steps_of(candidate: str) -> dict[str, Step]:
    """Prepare the steps of a candidate, in order."""
    prepare: Callable[[], dict[str, Step]] = resolve_name(f"{__package__}.{CANDIDATES[candidate]}")
    return prepare()
