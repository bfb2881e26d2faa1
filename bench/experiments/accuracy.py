"""Served boxes against the reference detector: F1 at IoU 0.9 and confidence 0.25, matched by class."""

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from app.settings import environment
from app.zoo import registry
from app.zoo.download import download
from bench.experiments.options import Commands
from bench.harness.errors import ContestantError
from bench.harness.reference_detector import QUERY, MatchCounts, ReferenceDetector, boxes
from bench.load.images import SAMPLE_FOLDER

_SECONDS = 60


def run(options: argparse.Namespace) -> int:
    """Print the agreement of a running server with the reference detector."""
    images = sorted(options.images.glob("*.jpg"))
    if not images:
        raise ContestantError(f"{options.images} contains no JPEG")
    with TemporaryDirectory() as folder:
        network = options.network or _download(options.model, Path(folder))
        tally = _compare(options.url, options.model, ReferenceDetector(options.model, network), images)
    print(f"{options.model}: {tally}")
    return 0


def add_to(commands: Commands) -> None:
    """Add this experiment to the command line."""
    command = commands.add_parser("accuracy", help="served boxes against the reference detector (a server must run)")
    command.add_argument("--url", default="http://127.0.0.1:4603", help="URL of the server")
    command.add_argument("--images", type=Path, metavar="DIR", default=SAMPLE_FOLDER, help="images to send: a folder of JPEGs")
    command.add_argument("--model", default="yolo11n", help="model to use")
    command.add_argument("--network", type=Path, help="ONNX file of the published network; by default it is downloaded")
    command.set_defaults(run=run)


def _download(model: str, folder: Path) -> Path:
    entries = registry.load(environment.load().registry_path)
    if model not in entries:
        raise ContestantError(f"{model} is not a model that pull knows; name its published network with --network")
    return download(entries[model], folder)


def _compare(url: str, model: str, reference: ReferenceDetector, images: list[Path]) -> MatchCounts:
    tally = MatchCounts()
    try:
        with httpx.Client(base_url=url, timeout=_SECONDS, trust_env=False) as client:
            for path in images:
                image = path.read_bytes()
                answer = client.post(f"/predict/{model}", params=QUERY, content=image).raise_for_status()
                tally.add(reference.detect(image), boxes(answer.json()))
    except httpx.HTTPError as error:
        raise ContestantError(f"{url}: {error}") from error
    return tally
