"""Why Triton could not load models, from its log: its index does not tell it of every model."""

import re
from pathlib import Path

# Source: the log of Triton 2.51, the one that `install` gets. Messages are quoted, with their line breaks escaped.
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
    """Return the reason, one line, for each model that could not be loaded.

    Args:
        log: Triton's, from its start.
    """
    failures = {}
    for found in _FAILURE.finditer(log.read_text(encoding="utf-8", errors="replace")):
        reason = found["reason"].partition(_LINE_BREAK)[0].rstrip(".")
        failures[found["model"]] = f"{reason} ({found['position'].rstrip('.')})" if found["position"] else reason
    return failures
