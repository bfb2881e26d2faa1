"""Reasons of failed model loads, from Triton's log: its index does not report them for every model."""

import re
from pathlib import Path

# Source: the log of Triton 2.51, the version that `install` pins. Messages are quoted, with escaped line breaks.
_FAILURE = re.compile(
    r"""
    (?: ^\[libprotobuf\ ERROR\ [^\]\n]*\]\ Error\ parsing\ text-format\ inference\.ModelConfig:\ (?P<position>.*)\n )?
    ^E\d.*?\]\ "(?: Poll\ failed\ for\ model\ directory | failed\ to\ load(?:\ model)? )\ '(?P<model>[^']+)'
    (?: \ version\ \d+ )?:\ (?P<reason>.*)"$
    """,
    re.MULTILINE | re.VERBOSE,
)
_LINE_BREAK = r"\n"


def read_load_failures(log: Path) -> dict[str, str]:
    """Return a one-line reason for each model that could not be loaded."""
    failures = {}
    for found in _FAILURE.finditer(log.read_text(encoding="utf-8", errors="replace")):
        reason = found["reason"].partition(_LINE_BREAK)[0].rstrip(".")
        failures[found["model"]] = f"{reason} ({found['position'].rstrip('.')})" if found["position"] else reason
    return failures
