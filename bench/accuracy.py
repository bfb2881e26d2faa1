"""Served boxes against the detector's own pre- and post-processing (tests/reference.py)."""

from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from app import catalogue, config
from app.pull import fetch
from tests.reference import Box, Reference, matches

OVERLAP = 0.9


def report(url: str, model: str, pictures: Path, network: Path | None) -> None:
    """Print precision, recall and F1 at IoU 0.9 and confidence 0.25, matched by class."""
    with TemporaryDirectory() as folder:
        file = network or fetch(catalogue.load(config.load().catalogue)[model], Path(folder))
        reference = Reference(model, file)
        matched = expected = found = 0
        files = sorted(pictures.glob("*.jpg"))
        for path in files:
            picture = path.read_bytes()
            query = {"confidence": "0.25", "boxes": "pixel", "max_detections": "300"}
            answer = httpx.post(f"{url}/predict/{model}", params=query, content=picture, timeout=60).raise_for_status()
            ours = [Box(d["class_id"], d["confidence"], (d["x1"], d["y1"], d["x2"], d["y2"])) for d in answer.json()["detections"]]
            theirs = reference.detect(picture)
            matched += matches(theirs, ours, OVERLAP)
            expected += len(theirs)
            found += len(ours)
    print(f"{model}: {len(files)} pictures, {expected} boxes expected, {found} served, {matched} matched at IoU {OVERLAP}")
    print(f"precision {matched / found:.4f}  recall {matched / expected:.4f}  F1 {2 * matched / (expected + found):.4f}")
