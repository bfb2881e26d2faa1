"""Served boxes against the detector's own pre- and post-processing (tests/reference.py)."""

from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from app import catalogue, config
from app.pull import fetch
from tests.reference import QUERY, Reference, Tally, boxes


def report(url: str, model: str, pictures: Path, network: Path | None) -> None:
    """Print F1 at IoU 0.9 and confidence 0.25, matched by class."""
    tally = Tally()
    with TemporaryDirectory() as folder:
        file = network or fetch(catalogue.load(config.load().catalogue)[model], Path(folder))
        reference = Reference(model, file)
        for path in sorted(pictures.glob("*.jpg")):
            picture = path.read_bytes()
            answer = httpx.post(f"{url}/predict/{model}", params=QUERY, content=picture, timeout=60).raise_for_status()
            tally.add(reference.detect(picture), boxes(answer.json()))
    print(f"{model}: {tally}")
