"""What the load driver sends."""

from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from bench.load import Sample

FOLDER = Path(__file__).parents[1] / "tests" / "pictures"
EXPECTED = {"astronaut": frozenset({"person"}), "chelsea": frozenset({"cat"}), "coffee": frozenset({"cup"})}
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"}
SEED = 4603
SIZES = {
    "astronaut": [(320, 320), (512, 512), (640, 640), (800, 800), (1080, 1080), (1600, 1600), (640, 640), (2448, 2448)],
    "chelsea": [(320, 213), (480, 320), (640, 427), (640, 427), (1024, 683), (1280, 853), (1920, 1280), (2592, 1728)],
    "coffee": [(320, 240), (500, 333), (640, 427), (640, 480), (960, 640), (1280, 720), (1920, 1080), (4000, 3000)],
}
"""Width and height of the default pictures: most as web pages and COCO have them, some as cameras do, one of 12 megapixels."""
COCO_SIZES = [(640, 480), (640, 427), (480, 640), (640, 425), (640, 640), (500, 375), (640, 360), (427, 640)]


@cache
def varied() -> tuple[Sample, ...]:
    """Make the default set: the same bytes on every machine with the same encoder, in the same shuffled order."""
    random = np.random.default_rng(SEED)
    samples = [_sample(name, size, random) for name, sizes in SIZES.items() for size in sizes]
    return tuple(samples[position] for position in random.permutation(len(samples)))


@cache
def coco_sized(folder: Path | None = None) -> tuple[Sample, ...]:
    """Take the JPEGs of a folder, shrunk to 640 pixels if they are larger; without one, make such pictures."""
    if folder is None:
        random = np.random.default_rng(SEED)
        # Cut to a square or upright, too little is left of the cat.
        shapes = [(name, size) for size in COCO_SIZES for name in EXPECTED if name != "chelsea" or size[0] > size[1]]
        return tuple(_sample(name, size, random) for name, size in shapes)
    return tuple(
        sample._replace(body=_within(sample.body, 640)) for sample in _files(folder) if sample.body.startswith(b"\xff\xd8")
    )


def given(path: Path | None) -> tuple[Sample, ...]:
    """Read one picture, or those of a folder; without a path, make the default set.

    Raises:
        ValueError: There is none.

    """
    samples = varied() if path is None else tuple(_files(path))
    if not samples:
        raise ValueError(f"{path} holds no picture")
    return samples


def _files(path: Path) -> Iterator[Sample]:
    paths = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
    for file in paths:
        yield Sample(file.name, file.read_bytes(), EXPECTED.get(file.stem, frozenset()))


def _sample(name: str, size: tuple[int, int], random: np.random.Generator) -> Sample:
    """Cut to the shape, scale, mirror every other, and add the noise that makes a JPEG as large as a camera's."""
    with Image.open(FOLDER / f"{name}.jpg") as picture:
        scaled = ImageOps.fit(picture.convert("RGB"), size, Image.Resampling.BICUBIC)
    if random.random() < 0.5:  # noqa: PLR2004
        scaled = ImageOps.mirror(scaled)
    noise = random.integers(-6, 7, (size[1], size[0], 1), dtype=np.int16)
    pixels = np.clip(np.asarray(scaled, np.int16) + noise, 0, 255).astype(np.uint8)
    return Sample(f"{name} {size[0]}x{size[1]}", _jpeg(Image.fromarray(pixels), int(random.integers(82, 93))), EXPECTED[name])


def _within(body: bytes, side: int) -> bytes:
    with Image.open(BytesIO(body)) as picture:
        if max(picture.size) <= side:
            return body
        smaller = ImageOps.contain(picture.convert("RGB"), (side, side), Image.Resampling.BICUBIC)
    return _jpeg(smaller, 90)


def _jpeg(picture: Image.Image, quality: int) -> bytes:
    file = BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return file.getvalue()
