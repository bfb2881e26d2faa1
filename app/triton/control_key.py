"""The key that a Triton asks for before it changes what it maps, traces or logs: its protocols for that are restricted."""

import re
from contextlib import suppress
from pathlib import Path

HEADER = "nereid"
"""Name of the key in Triton's option `--grpc-restricted-protocol=PROTOCOLS:HEADER=KEY`."""

_METADATA = f"triton-grpc-protocol-{HEADER}"
_KEY = re.compile("[!-~]+")


def metadata(path: Path | None) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata that carries the key in a file; none if there is no file, or no key in it.

    It is read for each call, because a Triton that is restarted has a new key.
    """
    text = ""
    if path is not None:
        with suppress(OSError, UnicodeDecodeError):
            text = path.read_text(encoding="ascii").strip()
    return ((_METADATA, text),) if _KEY.fullmatch(text) else ()
