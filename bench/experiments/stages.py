"""CPU time from an encoded image to a canvas by step: Nereid's own functions beside plain libraries, in interleaved runs."""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.imaging.decode import decode
from app.imaging.fit import Letterbox
from app.imaging.header import ImageHeader, PixelLimits, read_header
from app.imaging.transform import ImageTransform
from bench.experiments.options import Commands, add_shared
from bench.harness.processes import calling
from bench.load.images import unlabelled_samples
from bench.report.progress import say
from bench.report.text import spread

Canvas = NDArray[np.uint8]
Steps = dict[str, Callable[[Any], Any]]
"""Each takes the result of the previous step; the first one takes the bytes of an image."""

_SIDE, _PAD = 640, 114
_PIXEL_LIMITS = PixelLimits(jpeg=50_000_000, non_jpeg=50_000_000)


_CANVAS = np.zeros((_SIDE, _SIDE, 3), np.uint8)
"""All draw on it again and again, as on a slot in shared memory."""
_LETTERBOX = Letterbox((_SIDE, _SIDE), "center", enlarge=True, pad=_PAD)


def _decode(header: ImageHeader) -> tuple[Canvas, ImageTransform, Canvas]:
    """Decode with Nereid's function, into the canvas if the image need not be resized."""
    transform = _LETTERBOX.fit(header.width, header.height)
    return decode(header, transform.min_decode_size, transform.area(_CANVAS)), transform, _CANVAS


def _resize_with_opencv(pixels: Canvas) -> None:
    inside, _ = _fit(pixels.shape[1], pixels.shape[0])
    cv2.resize(pixels, inside.shape[1::-1], dst=inside)


def _resize_with_pillow(image: Image.Image) -> None:
    """Resize by the affine transform."""
    inside, scale = _fit(image.width, image.height)
    size = inside.shape[1], inside.shape[0]
    if size != image.size:
        coefficients = (1 / scale, 0, 0, 0, 1 / scale, 0)
        image = image.transform(size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
    inside[:] = np.asarray(image)


def _fit(width: int, height: int) -> tuple[Canvas, float]:
    """Pad the canvas; return the part of it for an image of this size, and the scale of the image."""
    scale = min(_SIDE / width, _SIDE / height)
    inner = round(width * scale), round(height * scale)
    _CANVAS[:] = _PAD
    left, top = (_SIDE - inner[0]) // 2, (_SIDE - inner[1]) // 2
    return _CANVAS[top : top + inner[1], left : left + inner[0]], scale


CANDIDATES: dict[str, Steps] = {
    "nereid": {
        "header": lambda data: read_header(data, _PIXEL_LIMITS),
        "decode": _decode,
        "letterbox": lambda decoded: _LETTERBOX.draw(*decoded),
    },
    "opencv": {
        "decode": lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB),
        "letterbox": _resize_with_opencv,
    },
    # Pillow in this environment, which is pillow-simd in Nereid's.
    "pillow": {
        "header": lambda data: Image.open(BytesIO(data)),
        "decode": lambda image: image.convert("RGB"),
        "letterbox": _resize_with_pillow,
    },
}
_BASE = "nereid"


class Spent(NamedTuple):
    """Measurement of one process of a candidate."""

    images: int
    seconds: float
    milliseconds: dict[str, float]
    """CPU time per image, by step."""

    @property
    def total(self) -> float:
        """CPU milliseconds per image."""
        return sum(self.milliseconds.values())


def time_steps(name: str, folder: Path, seconds: float) -> Spent:
    """Run the steps of a candidate on one image of a folder after the other."""
    cv2.setNumThreads(1)
    images = [file.read_bytes() for file in sorted(folder.iterdir())]
    steps = CANDIDATES[name]
    for image in images:  # warm up libraries and allocator
        _run(steps, image, {})
    totals: dict[str, float] = {}
    count, start = 0, perf_counter()
    while (elapsed := perf_counter() - start) < seconds:
        _run(steps, images[count % len(images)], totals)
        count += 1
    return Spent(count, elapsed, {step: total / count * 1e3 for step, total in totals.items()})


def _run(steps: Steps, value: Any, totals: dict[str, float]) -> None:  # noqa: ANN401 - steps differ in it
    kept = [value]  # otherwise the time of a step would include freeing the previous one's objects
    for step, work in steps.items():
        before = process_time()
        kept.append(work(kept[-1]))
        totals[step] = totals.get(step, 0.0) + process_time() - before
    before = process_time()
    kept.clear()
    totals["free"] = totals.get("free", 0.0) + process_time() - before


def run(options: argparse.Namespace) -> int:
    """Print the steps of every candidate."""
    spent: dict[str, list[Spent]] = {name: [] for name in CANDIDATES}
    with image_files() as files:
        for number in range(options.rounds):
            for name in CANDIDATES:
                say(f"round {number + 1} of {options.rounds}, {name}")
                spent[name] += spend(name, files, options.seconds)
    say()
    print(f"CPU milliseconds per image, medians of {options.rounds} runs of {options.seconds:g} s, each in a process of its own")
    print("\n".join(describe(spent)))
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("stages", help="CPU time of decoding and fitting by step, beside other libraries")
    add_shared(command, seconds=2.0, rounds=5)
    command.set_defaults(run=run)


def describe(spent: Mapping[str, Sequence[Spent]]) -> Iterator[str]:
    """Describe each candidate by the medians of its steps, then by the ratio of its imaging to Nereid's."""
    width = max(map(len, spent), default=0)
    for name, runs in spent.items():
        steps = {step: median(one.milliseconds[step] for one in runs) for step in runs[0].milliseconds}
        parts = ", ".join(f"{step} {value:.3f}" for step, value in steps.items())
        yield f"{name:{width}} {median(one.total for one in runs):6.2f} = {parts}"
    yield f"relative to {_BASE}, median of the runs' ratios (min..max):"
    for name, runs in spent.items():
        if name != _BASE:
            yield f"  {name} {spread([one.total / base.total for one, base in zip(runs, spent[_BASE], strict=True)])}"


@contextmanager
def image_files() -> Iterator[Path]:
    """Write the COCO-sized images to a temporary folder."""
    with TemporaryDirectory(prefix="nereid-bench-") as target:
        for number, sample in enumerate(unlabelled_samples()):
            Path(target, f"{number:04}").write_bytes(sample.body)
        yield Path(target)


def spend(name: str, files: Path, seconds: float, count: int = 1) -> list[Spent]:
    """Run a candidate on a folder of images, in `count` new processes at the same time."""
    with ExitStack() as stack:
        running = [stack.enter_context(calling(time_steps, name, files, seconds)) for _ in range(count)]
        return [wait() for wait in running]
