"""The server with its own ONNX Runtime, in the reference's environment."""

from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from app.embedded.server import EmbeddedTriton
from app.host.ports import is_free
from app.settings.schema import Settings
from bench.harness.lineup import Lineup
from bench.harness.triton import Triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run
from bench.load.images import SAMPLE_FOLDER, Sample, classifier_samples, coco_samples
from tests.bench.support import needs_reference


@needs_reference
@pytest.mark.parametrize(
    ("model", "path", "samples"),
    [("yolo11n", "/detect", coco_samples), ("efficientnet_lite0", "/classify", classifier_samples)],
    ids=["detector", "classifier"],
)
def test_in_process_finds_what_is_in_the_images_without_a_triton(
    settings: Settings, tmp_path: Path, model: str, path: str, samples: Callable[[Path], Sequence[Sample]]
) -> None:
    lineup = Lineup(Triton(settings, psutil.Process(), EmbeddedTriton(settings)), 2, tmp_path)
    contestant = lineup.contestant("in_process", model)
    with lineup.start(contestant) as server:
        load = drive_closed_loop(f"{server.url}{path}", samples(SAMPLE_FOLDER), clients=2, seconds=60, requests=3)
        outcome = run(load)

    assert outcome.statuses == {"200": 3}
    assert (contestant.workers, contestant.uses_triton) == (1, False)
    assert is_free("127.0.0.1", contestant.port)
