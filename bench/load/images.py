"""The images that the load driver sends."""

from base64 import b64encode
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from PIL import Image, ImageOps

_ROOT = Path(__file__).parents[2]
SAMPLE_FOLDER = _ROOT / "tests" / "images"
COCO_FOLDER = _ROOT.parent / "shared" / "images"
"""Images of COCO; optional."""
EXPECTED = {"astronaut": frozenset({"person"}), "chelsea": frozenset({"cat"}), "coffee": frozenset({"cup"})}
"""Classes that every detector must find in the sample images."""
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"}
SEED = 4603
SIZES = {
    "astronaut": [(320, 320), (512, 512), (640, 640), (800, 800), (1080, 1080), (1600, 1600), (640, 640), (2448, 2448)],
    "chelsea": [(320, 213), (480, 320), (640, 427), (640, 427), (1024, 683), (1280, 853), (1920, 1280), (2592, 1728)],
    "coffee": [(320, 240), (500, 333), (640, 427), (640, 480), (960, 640), (1280, 720), (1920, 1080), (4000, 3000)],
}
"""Width and height of the default images: most are typical of web pages and COCO, some of cameras, one has 12 megapixels."""
COCO_SIZES = [(640, 480), (640, 427), (480, 640), (640, 425), (640, 640), (500, 375), (640, 360), (427, 640)]
_COCO_SIDE = 640


class Sample(NamedTuple):
    """One image to send."""

    name: str
    body: bytes
    """The encoded image."""
    expected: frozenset[str] | None
    """Class names that must be among the detections; if empty, any well-formed response is correct; if None, any response."""


@cache
def varied_samples() -> tuple[Sample, ...]:
    """Make the default images, with the same bytes and the same shuffled order on every machine with the same encoder."""
    random = np.random.default_rng(SEED)
    samples = [_vary(name, size, random) for name, sizes in SIZES.items() for size in sizes]
    return tuple(samples[position] for position in random.permutation(len(samples)))


@cache
def coco_samples() -> tuple[Sample, ...]:
    """Make images of the sizes of COCO's."""
    random = np.random.default_rng(SEED)
    # A square or upright crop would leave too little of the cat.
    shapes = [(name, size) for size in COCO_SIZES for name in EXPECTED if name != "chelsea" or size[0] > size[1]]
    return tuple(_vary(name, size, random) for name, size in shapes)


@cache
def unlabelled_samples() -> tuple[Sample, ...]:
    """Return COCO-sized images for models that find nothing; COCO's own images if available."""
    samples = coco_samples()
    if COCO_FOLDER.is_dir():
        jpegs = (sample for sample in _read(COCO_FOLDER) if sample.body.startswith(b"\xff\xd8"))
        samples = tuple(sample._replace(body=_shrink(sample.body, _COCO_SIDE)) for sample in jpegs)
    return tuple(sample._replace(expected=frozenset()) for sample in samples)


def large_sample() -> Sample:
    """Return the default image of 12 megapixels."""
    return max(varied_samples(), key=lambda sample: len(sample.body))


def progressive(jpeg: bytes) -> bytes:
    """Encode a JPEG again as a progressive one."""
    with Image.open(BytesIO(jpeg)) as image:
        return _encode_jpeg(image, 90, progressive=True)


def noise(kind: str, shape: tuple[int, ...]) -> bytes:
    """Encode an image of noise, which no format can compress; its shape is (height, width) if grey, (height, width, 3) if RGB."""
    pixels = np.random.default_rng(SEED).integers(0, 256, shape, np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind, compress_level=1)
    return file.getvalue()


def roboflow_request(image: bytes, model_id: str) -> bytes:
    """Make a request of Roboflow's interface from an encoded image, with the default confidence and IoU of Nereid."""
    encoded = {"type": "base64", "value": b64encode(image).decode()}
    return msgspec.json.encode({"model_id": model_id, "image": encoded, "confidence": 0.25, "iou_threshold": 0.7})


def given_samples(path: Path | None) -> tuple[Sample, ...]:
    """Read one image or a folder of images; without a path, make the default images.

    Raises:
        ValueError: There is no image.
    """
    samples = varied_samples() if path is None else tuple(_read(path))
    if not samples:
        raise ValueError(f"{path} contains no image")
    return samples


def _read(path: Path) -> Iterator[Sample]:
    paths = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    for file in paths:
        yield Sample(file.name, file.read_bytes(), EXPECTED.get(file.stem, frozenset()))


def _vary(name: str, size: tuple[int, int], random: np.random.Generator) -> Sample:
    """Crop, scale, mirror every other image, and add noise so that the JPEG is as large as a camera's."""
    with Image.open(SAMPLE_FOLDER / f"{name}.jpg") as image:
        scaled = ImageOps.fit(image.convert("RGB"), size, Image.Resampling.BICUBIC)
    if random.random() < 0.5:  # noqa: PLR2004
        scaled = ImageOps.mirror(scaled)
    noise = random.integers(-6, 7, (size[1], size[0], 1), dtype=np.int16)
    pixels = np.clip(np.asarray(scaled, np.int16) + noise, 0, 255).astype(np.uint8)
    body = _encode_jpeg(Image.fromarray(pixels), int(random.integers(82, 93)))
    return Sample(f"{name} {size[0]}x{size[1]}", body, EXPECTED[name])


def _shrink(body: bytes, side: int) -> bytes:
    with Image.open(BytesIO(body)) as image:
        if max(image.size) <= side:
            return body
        smaller = ImageOps.contain(image.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
    return _encode_jpeg(smaller, 90)


def _encode_jpeg(image: Image.Image, quality: int, *, progressive: bool = False) -> bytes:
    file = BytesIO()
    image.save(file, "JPEG", quality=quality, progressive=progressive)
    return file.getvalue()
