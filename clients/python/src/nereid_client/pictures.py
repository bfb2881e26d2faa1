"""Images: what may be sent, and the pictures of a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

Image = bytes | str | os.PathLike[str]
"""An encoded image, the path of one, or an `https://` address that the gateway fetches."""

SUFFIXES = {".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


def pictures_in(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """List the pictures in a folder and the folders in it, in the order of their paths.

    Raises:
        OSError: A folder cannot be listed.
    """

    def fail(error: OSError) -> None:
        raise error

    found = (Path(parent, name) for parent, _, names in os.walk(folder, onerror=fail) for name in names)
    return iter(sorted(path for path in found if path.suffix.lower() in SUFFIXES and path.is_file()))
