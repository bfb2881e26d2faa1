"""Images to send: valid ones of every format and mode, and what can be done to them."""

import struct
import zlib
from collections.abc import Iterator
from functools import cache
from random import Random

from PIL import Image

from tests.imaging.samples import FORMATS, GREY, NOISE, RGBA, encode, exif_of, png

MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "F", "I;16", "I;16B")
_SIGNATURES = (b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"RIFF\x40\0\0\0WEBPVP8 ", b"GIF89a", b"BM", b"")


_NOT_AS_TIFF = {"PA", "CMYK", "YCbCr", "LAB", "F"}
"""Modes that Pillow can write, and the gateway does not accept."""


@cache
def valid_images() -> dict[str, bytes]:
    """Encode one image in every format and mode that Pillow can write, and with the features that formats have."""
    photo = NOISE.resize((96, 72), Image.Resampling.BICUBIC)
    found = {}
    for mode in MODES:
        for image_format in FORMATS:
            if image_format == "TIFF" and mode in _NOT_AS_TIFF:
                continue
            try:
                found[f"{image_format} {mode}"] = encode(_convert(photo, mode), image_format)
            except (OSError, ValueError, KeyError, ImportError):
                continue  # Pillow cannot write it
    frames = {"save_all": True, "append_images": [photo.rotate(90), photo.rotate(180)], "duration": 50}
    return found | {
        "JPEG progressive": encode(photo, "JPEG", progressive=True),
        "JPEG EXIF": encode(photo, "JPEG", exif=exif_of(6)),
        "JPEG subsampled": encode(photo, "JPEG", subsampling=2, quality=60, optimize=True),
        "JPEG comment and profile": encode(photo, "JPEG", comment=b"x" * 300, icc_profile=bytes(3000)),
        "JPEG restarts": encode(photo, "JPEG", restart_marker_rows=1),
        "PNG animated": encode(photo, "PNG", **frames),
        "PNG transparent": encode(photo.convert("P"), "PNG", transparency=3),
        "PNG 16-bit RGBA": png(24, 16, 16, RGBA, bytes(range(256)) * 12),
        "PNG 2-bit": png(64, 16, 2, GREY, bytes(range(256))),
        "WEBP lossy": encode(photo, "WEBP", lossless=False, quality=50),
        "WEBP animated": encode(photo, "WEBP", **frames),
        "WEBP EXIF": encode(photo, "WEBP", exif=exif_of(8)),
        "GIF animated": encode(photo.convert("P"), "GIF", **frames),
        "GIF interlaced": encode(photo.convert("P"), "GIF", interlace=1, transparency=1),
    }


def truncate(data: bytes) -> Iterator[bytes]:
    """Cut at each twentieth of the file, and at each of its first bytes."""
    yield from (data[: len(data) * twentieth // 20] for twentieth in range(1, 20))
    yield from (data[:length] for length in range(1, min(len(data), 30)))


def damage(data: bytes, random: Random) -> bytes:
    """Damage a file as a bad disk or an attacker does; a PNG gets the right checksums again, or else nothing would read it."""
    broken = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        at = random.randrange(min(len(broken), random.choice((64, 1024, len(broken)))))
        match random.randrange(5):
            case 0 | 1:
                broken[at] ^= 1 << random.randrange(8)
            case 2:
                broken[at : at + 4] = random.choice((bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\1"))
            case 3:
                del broken[at : at + random.randrange(1, 20)]
            case _:
                broken[at:at] = random.randbytes(random.randrange(1, 20))
        broken = broken or bytearray(1)
    return _renew_checksums(bytes(broken)) if random.randrange(2) else bytes(broken)


def invent(random: Random) -> bytes:
    """Make random bytes, most of them behind the first bytes of an image."""
    return random.choice(_SIGNATURES) + random.randbytes(random.choice((1, 10, 100, 2000)))


def bombs() -> list[bytes]:
    """Make small files whose headers announce more pixels than any limit allows: one with its pixels, and one without."""
    width, height = 16_000, 16_000
    return [png(width, height, 1, GREY, bytes(width // 8 * height)), png(width, height, 8, RGBA)]


def _convert(image: Image.Image, mode: str) -> Image.Image:
    if mode in {"La", "PA", "RGBa"}:
        return image.convert({"La": "LA", "PA": "P", "RGBa": "RGBA"}[mode]).convert(mode)
    if mode in {"LAB", "HSV"}:
        return Image.frombytes(mode, image.size, image.tobytes())
    return image.convert("I").convert(mode) if mode.startswith("I;") else image.convert(mode)


def _renew_checksums(data: bytes) -> bytes:
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return data
    at, parts = 8, [data[:8]]
    while at + 12 <= len(data):
        end = at + 8 + int.from_bytes(data[at : at + 4], "big")
        if end + 4 > len(data):
            break
        parts += [data[at:end], struct.pack(">I", zlib.crc32(data[at + 4 : end]))]
        at = end + 4
    return b"".join([*parts, data[at:]])
