"""Images: what may be sent, and the pictures of a folder."""

import os
from collections.abc import Iterator
from pathlib import Path

Image = bytes | str | os.PathLike[str]
"""An encoded image, the path of one, or an `https://` address that the gateway fetches."""

SUFFIXES = {".avif", ".bmp", ".gif", ".heic", ".heif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


def is_address(image: Image) -> bool:
    """Return whether the gateway fetches the image."""
    return isinstance(image, str) and image.startswith("https://")


def read(image: Image) -> bytes:
    """Return the encoded image."""
    return image if isinstance(image, bytes) else Path(image).read_bytes()


def pictures_in(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """List the pictures in a folder and the folders in it, in the order of their paths."""
    return (path for path in sorted(Path(folder).rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file())
