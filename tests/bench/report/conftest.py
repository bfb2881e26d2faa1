"""Two records on disk."""

from pathlib import Path

import pytest

from bench.report.records import save_record
from tests.bench.support import make_run, make_runs_record


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Path]:
    """Files of a run before and after; each also has a run that the other does not have."""
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    save_record(before, make_runs_record(make_run(), make_run(clients=16)))
    save_record(after, make_runs_record(make_run(0.5), make_run(contestant="other")))
    return before, after
