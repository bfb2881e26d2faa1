"""The control key, which Triton requires in requests of its restricted protocols."""

import re
from contextlib import suppress
from pathlib import Path

HEADER = "nereid"
"""The HEADER in Triton's option `--grpc-restricted-protocol=PROTOCOLS:HEADER=KEY`."""

_METADATA = f"triton-grpc-protocol-{HEADER}"
_KEY = re.compile("[!-~]+")


def metadata(path: Path | None) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata with the key in a file, which a restarted Triton changes; empty if there is no valid key in it."""
    text = ""
    if path is not None:
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_text(encoding="ascii").strip()
    return ((_METADATA, text),) if _KEY.fullmatch(text) else ()
