"""The reference with a common mistake, in the reference's environment."""

from pathlib import Path

import pytest

from bench.harness.lineup import Lineup
from bench.harness.triton import Triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run
from bench.load.images import SAMPLE_FOLDER, unlabelled_samples
from tests.bench.support import clients_of, needs_reference

pytestmark = [needs_reference, pytest.mark.system]


def test_it_answers(fixtures: Triton, tmp_path: Path) -> None:
    """The mistake costs time, but the answers are right."""
    lineup = Lineup(fixtures, 1, tmp_path)
    with lineup.start(lineup.contestant("broken", "null")) as server:
        load = drive_closed_loop(f"{server.url}/detect", unlabelled_samples(SAMPLE_FOLDER), clients=2, seconds=20, requests=6)
        outcome = run(load)

    assert outcome.statuses == {"200": 6}


def test_every_request_has_a_client_of_its_own() -> None:
    """Each request opens and closes a connection, which is the mistake."""
    assert clients_of("broken", requests=2) == ["created", "used", "closed", "created", "used", "closed"]
