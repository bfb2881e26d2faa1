"""Make images smaller before they are sent; it needs Pillow."""

from io import BytesIO
from typing import NamedTuple

from nereid_client.results import ImageSize


class Prepare(NamedTuple):
    """What is sent instead of an image whose longest side has more pixels."""

    longest_side: int
    """Pixels."""
    quality: int = 85
    """Of the JPEG, 1 to 95."""

    def __str__(self) -> str:
        return f"{self.longest_side}:{self.quality}"


class Shrunk(NamedTuple):
    """A smaller copy of an image."""

    data: bytes
    size: ImageSize
    """Of the copy as it is stored."""
    original: ImageSize
    """Of the original as it is stored."""

    def upright(self, sent: ImageSize) -> ImageSize:
        """Return the size of the upright original; `sent` is that of the upright copy."""
        is_sideways = sent != self.size
        return ImageSize(self.original.height, self.original.width) if is_sideways else self.original


def shrink(data: bytes, prepare: Prepare) -> Shrunk | None:
    """Return a smaller copy of an image; None if it is small enough, or Pillow cannot read it, and so the gateway decides."""
    from PIL import ExifTags, Image  # noqa: PLC0415 - an extra

    try:
        with Image.open(BytesIO(data)) as image:
            original = ImageSize(*image.size)
            if max(image.size) <= prepare.longest_side or image.mode.startswith(("I", "F")):  # 16 bits are the gateway's business
                return None
            # The gateway turns the copy as it would turn the original: not by XMP, which `getexif` reads. Pillow itself turns TIFF.
            exif, orientation = Image.Exif(), Image.Exif()
            exif.load(image.info.get("exif", b""))
            orientation[ExifTags.Base.Orientation] = exif.get(ExifTags.Base.Orientation, 1)
            scale = prepare.longest_side / max(image.size)
            width, height = (max(1, round(side * scale)) for side in image.size)
            image.draft("RGB", (2 * width, 2 * height))  # a JPEG is decoded at a fraction of its size, but not below this one
            small = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2)
    except Exception:  # noqa: BLE001 - Pillow raises errors of many kinds for damaged files
        return None
    file = BytesIO()
    small.save(file, "JPEG", quality=prepare.quality, exif=orientation)
    return Shrunk(file.getvalue(), ImageSize(width, height), original)
