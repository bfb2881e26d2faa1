"""The candidates by name. Imports none of them: each may need an environment of its own."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

Step = Callable[[Any], Any]
"""Takes what the previous step has returned; the first takes the bytes of an image."""

CANDIDATES = {
    "nereid": "nereid:inline_steps",
    "nereid_shm": "nereid:shared_steps",
    "simplejpeg": "libraries:simplejpeg_steps",
    "opencv": "libraries:opencv_steps",
    "pillow": "libraries:pillow_steps",
    "reference": "reference:reference_steps",
}
"""Module and function of each."""
NEREID = ("nereid", "nereid_shm")
"""Those that measure Nereid's own code."""


def steps_of(candidate: str) -> dict[str, Step]:
    """Prepare the steps of a candidate, in order."""
    prepare: Callable[[], dict[str, Step]] = resolve_name(f"{__package__}.{CANDIDATES[candidate]}")
    return prepare()
