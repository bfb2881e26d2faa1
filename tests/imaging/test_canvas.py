"""From an encoded image to a filled canvas, in the right order: header, canvas, pixels."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.errors import GatewayError, ImageTooLarge, InvalidImage, InvalidImageDimensions, UnsupportedFormat
from app.imaging.canvas import check_image, draw_image, is_quick_to_check
from app.imaging.decode import decode, estimate_decode_bytes
from app.imaging.header import ImageHeader, read_header
from app.imaging.letterbox import Letterbox
from app.imaging.transform import ImageTransform
from tests.imaging.samples import GREY, MEGA, NOISE, encode, exif_of, limits, png, store
from tests.support import ROOT, sample_image

CENTRED = Letterbox((96, 64), "center", enlarge=True, pad=114)
MEASURE = """
import sys
from pathlib import Path
import numpy as np
from app.imaging.canvas import draw_image
from app.imaging.fill import CenterCrop
from app.imaging.header import PixelLimits
def status(field):
    return int(Path("/proc/self/status").read_text().partition(field + ":")[2].split()[0]) * 1024
reserved = []
data, fit, canvas = sys.stdin.buffer.read(), CenterCrop((224, 224), 0.875, "bicubic"), np.zeros((224, 224, 3), np.uint8)
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
before = status("VmRSS")
draw_image(data, fit, PixelLimits(10**8, 10**8), reserved.append, lambda: canvas)
print(status("VmHWM") - before, sum(reserved))
"""
BOXES = {
    "centred": CENTRED,
    "top left": Letterbox((96, 64), "top_left", enlarge=True, pad=0),
    "not enlarged": Letterbox((96, 64), "center", enlarge=False, pad=255),
    "exactly fitting": Letterbox((64, 48), "center", enlarge=True, pad=114),
    "full width": Letterbox((64, 64), "center", enlarge=True, pad=114),
}
SIDEWAYS = encode(Image.fromarray(store(np.asarray(NOISE), 6)), "JPEG", exif=exif_of(6))
IMAGES = {
    "JPEG": encode(NOISE, "JPEG"),
    "turned JPEG": SIDEWAYS,
    "CMYK JPEG": encode(NOISE.convert("CMYK"), "JPEG"),
    "large JPEG": sample_image("chelsea.jpg"),
    "very large JPEG": encode(NOISE.resize((1600, 1200)), "JPEG"),
    "sliver": encode(NOISE.resize((90, 1)), "JPEG"),
    "PNG": encode(NOISE, "PNG"),
    "palette": encode(NOISE.quantize(8), "GIF"),
}
REFUSED: list[tuple[bytes, type[GatewayError]]] = [
    (b"not an image", UnsupportedFormat),
    (b"\x89PNG\r\n\x1a\n" + b"\xff" * 50, InvalidImage),
    (png(2000, 2000, 8, GREY), ImageTooLarge),
    (png(101, 1, 8, GREY), InvalidImageDimensions),
]


class Canvas:
    """A canvas full of old data, which counts how often it is taken."""

    def __init__(self, letterbox: Letterbox, content: int = 7) -> None:
        self.pixels: NDArray[np.uint8] = np.full((letterbox.canvas_size[1], letterbox.canvas_size[0], 3), content, np.uint8)
        self.taken = 0

    def take(self) -> NDArray[np.uint8]:
        self.taken += 1
        return self.pixels


def unlimited(_: int) -> None: ...


@pytest.mark.parametrize("data", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("letterbox", BOXES.values(), ids=BOXES)
def test_every_byte_of_the_canvas_is_written(letterbox: Letterbox, data: bytes) -> None:
    """Nothing of the request that had the memory before shows through, and the image is where the transform says."""
    canvases = [Canvas(letterbox, content) for content in (7, 201)]

    transforms = [draw_image(data, letterbox, limits(2 * MEGA), unlimited, canvas.take) for canvas in canvases]

    np.testing.assert_array_equal(canvases[0].pixels, canvases[1].pixels)
    assert transforms[0] == transforms[1]
    outside = np.ones(canvases[0].pixels.shape, bool)
    transforms[0].area(outside.view(np.uint8))[:] = 0
    assert (canvases[0].pixels[outside] == letterbox.pad).all()


@pytest.mark.parametrize("data", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("letterbox", BOXES.values(), ids=BOXES)
def test_canvas_shows_the_decoded_image(letterbox: Letterbox, data: bytes) -> None:
    """The result is the same, whether the image is decoded straight into the canvas or elsewhere and drawn."""
    canvas, expected = Canvas(letterbox), Canvas(letterbox)

    transform = draw_image(data, letterbox, limits(2 * MEGA), unlimited, canvas.take)

    header = read_header(data, limits(2 * MEGA))
    assert transform == letterbox.fit(header.width, header.height)
    letterbox.draw(decode(header, transform.min_decode_size), transform, expected.pixels)
    np.testing.assert_array_equal(canvas.pixels, expected.pixels)


@pytest.mark.parametrize(("data", "is_direct"), [("JPEG", True), ("turned JPEG", False), ("PNG", False)])
def test_image_is_decoded_straight_into_the_canvas_if_possible(
    monkeypatch: pytest.MonkeyPatch, data: str, *, is_direct: bool
) -> None:
    """An upright JPEG that comes out at the size of its area needs no copy."""
    decoded: list[NDArray[np.uint8]] = []

    def record(header: ImageHeader, min_decode_size: tuple[int, int], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        decoded.append(decode(header, min_decode_size, out))
        return decoded[0]

    monkeypatch.setattr("app.imaging.canvas.decode", record)
    letterbox = BOXES["full width"]
    canvas = Canvas(letterbox)
    draw_image(IMAGES[data], letterbox, limits(MEGA), unlimited, canvas.take)

    assert np.may_share_memory(decoded[0], canvas.pixels) is is_direct


def test_transform_is_that_of_the_upright_image() -> None:
    """Boxes are mapped back to the image as a viewer shows it."""
    canvas = Canvas(CENTRED)

    assert draw_image(SIDEWAYS, CENTRED, limits(MEGA), unlimited, canvas.take) == ImageTransform(5, 0, 85, 64, 64, 48)


@pytest.mark.parametrize(("data", "error"), REFUSED)
def test_no_canvas_is_taken_for_a_refused_image(data: bytes, error: type[GatewayError]) -> None:
    """An image that is refused by its header takes no slot in shared memory."""
    canvas = Canvas(CENTRED)

    with pytest.raises(error):
        draw_image(data, CENTRED, limits(MEGA), unlimited, canvas.take)
    assert canvas.taken == 0


def test_memory_is_reserved_before_the_canvas_is_taken() -> None:
    """As much as decoding takes at its peak; nothing is reserved for an image that is refused by its header."""
    canvas = Canvas(CENTRED)
    reserved: list[int] = []

    def reserve(nbytes: int) -> None:
        assert canvas.taken == 0
        reserved.append(nbytes)

    draw_image(IMAGES["very large JPEG"], CENTRED, limits(2 * MEGA), reserve, canvas.take)
    with pytest.raises(ImageTooLarge):
        draw_image(IMAGES["very large JPEG"], CENTRED, limits(MEGA), reserve, canvas.take)

    header = read_header(IMAGES["very large JPEG"], limits(2 * MEGA))
    assert reserved == [estimate_decode_bytes(header, (340, 256))] == [400 * 300 * 3]


@pytest.mark.parametrize(("image_format", "size"), [("JPEG", (8000, 2000)), ("JPEG", (2040, 2040)), ("PNG", (3000, 2000))])
def test_a_crop_takes_no_more_memory_than_was_reserved(image_format: str, size: tuple[int, int]) -> None:
    """As the kernel counts it, but for a few megabytes; the part of the image that is resized is copied."""
    data = encode(Image.new("RGB", size, "teal"), image_format)
    command = [sys.executable, "-c", MEASURE]
    output = subprocess.run(command, input=data, cwd=ROOT, capture_output=True, check=True).stdout

    taken, reserved = map(int, output.split())
    assert reserved / 2 < taken < reserved + 8_000_000


def test_without_memory_no_canvas_is_taken() -> None:
    """The caller gets the error of its own function, and nothing is decoded."""
    canvas = Canvas(CENTRED)

    def reserve(_: int) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        draw_image(IMAGES["PNG"][:-1000], CENTRED, limits(MEGA), reserve, canvas.take)
    assert canvas.taken == 0


def test_canvas_is_taken_before_the_image_is_decoded() -> None:
    """An image whose header is fine and whose data is not has taken the canvas, once, when it is refused."""
    canvas = Canvas(CENTRED)

    with pytest.raises(InvalidImage):
        draw_image(IMAGES["PNG"][:-1000], CENTRED, limits(MEGA), unlimited, canvas.take)
    assert canvas.taken == 1


def test_canvas_is_taken_once() -> None:
    canvas = Canvas(CENTRED)
    draw_image(IMAGES["JPEG"], CENTRED, limits(MEGA), unlimited, canvas.take)

    assert canvas.taken == 1


def test_error_of_the_canvas_is_passed_on() -> None:
    """If there is no memory for the image, the caller gets the reason, and nothing is decoded."""

    def take() -> NDArray[np.uint8]:
        raise MemoryError

    with pytest.raises(MemoryError):
        draw_image(IMAGES["JPEG"], CENTRED, limits(MEGA), unlimited, take)


@pytest.mark.parametrize("data", IMAGES.values(), ids=IMAGES)
def test_check_returns_the_transform_that_render_would(data: bytes) -> None:
    """A model that decodes the image itself fits it the same way."""
    canvas = Canvas(CENTRED)

    assert check_image(data, CENTRED, limits(2 * MEGA)) == draw_image(data, CENTRED, limits(2 * MEGA), unlimited, canvas.take)


@pytest.mark.parametrize(("data", "error"), REFUSED)
def test_check_refuses_what_render_refuses_by_the_header(data: bytes, error: type[GatewayError]) -> None:
    """The limits also apply to an image that the model decodes."""
    with pytest.raises(error):
        check_image(data, CENTRED, limits(MEGA))


def never(what: str) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        pytest.fail(f"{what} was called")

    return fail


@pytest.mark.parametrize(
    "data",
    [IMAGES["JPEG"][:-2000], IMAGES["CMYK JPEG"][:-2000], IMAGES["PNG"][:-1000], png(1000, 1000, 8, GREY)],
    ids=["truncated JPEG", "truncated CMYK JPEG", "truncated PNG", "PNG without pixels"],
)
def test_check_decodes_nothing(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image that cannot be decoded passes as long as its header is valid, and no decoder is called."""
    with pytest.raises(InvalidImage):
        draw_image(data, CENTRED, limits(MEGA), unlimited, Canvas(CENTRED).take)
    monkeypatch.setattr("app.imaging.jpeg.simplejpeg.decode_jpeg", never("libjpeg-turbo"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", never("Pillow"))

    assert check_image(data, CENTRED, limits(MEGA)).image_width in {64, 1000}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xff\xd8\xff" + bytes((1 << 20) - 3), True),
        (b"\xff\xd8\xff" + bytes((1 << 20) - 2), False),
        (b"\xff\xd8\xff", True),
        (encode(NOISE, "PNG"), False),
        (encode(NOISE, "WEBP"), False),
        (b"", False),
    ],
    ids=["JPEG of 1 MiB", "larger JPEG", "start of a JPEG", "PNG", "WebP", "empty"],
)
def test_only_a_small_jpeg_is_quick_to_check(data: bytes, *, expected: bool) -> None:
    """The header of a JPEG of up to 1 MiB is read in next to no time; the headers of other formats need Pillow."""
    assert is_quick_to_check(data) is expected
