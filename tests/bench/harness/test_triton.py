"""The embedded Triton of a measurement."""

from pathlib import Path

import pytest

from app.settings import environment
from bench.harness.errors import ContestantError
from bench.harness.triton import Triton, fixture_triton


def test_the_fixture_triton_has_a_home_of_its_own(fixtures: Triton) -> None:
    base = environment.load()
    home, installed = Path(fixtures.settings.triton_home), Path(base.triton_home).resolve()

    assert home.resolve() != installed
    assert (home / "server").resolve() == installed / "server"
    assert (home / "python").resolve() == installed / "python"
    assert fixtures.settings.triton_folder != base.triton_folder
    assert fixtures.process.is_running()


def test_a_model_that_was_not_pulled_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_MODEL_REPOSITORY", str(tmp_path))
    with pytest.raises(ContestantError, match="yolo11n has not been pulled"), fixture_triton(["yolo11n"]):
        pass
