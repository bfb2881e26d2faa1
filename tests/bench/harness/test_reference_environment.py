"""The environment of the servers Nereid is measured against."""

from pathlib import Path

import pytest

from bench.harness import reference_environment
from bench.harness.errors import ContestantError
from bench.harness.reference_environment import install_reference, is_installed, reference_python


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it, its servers cannot take part; one that was made from other requirements is made again."""
    made: list[Path] = []

    def make(folder: Path, requirements: Path, _python: str) -> None:
        assert requirements.is_file()
        folder.mkdir(exist_ok=True)
        made.append(folder)

    monkeypatch.setattr(reference_environment, "REFERENCE", tmp_path / "environment")
    monkeypatch.setattr(reference_environment, "make_environment", make)
    with pytest.raises(ContestantError, match="bench versus --install"):
        reference_python()
    install_reference()
    install_reference()

    assert is_installed()
    assert reference_python() == tmp_path / "environment" / "bin" / "python"
    assert len(made) == 1

    (tmp_path / "environment" / "complete").write_text("other requirements")
    install_reference()
    assert len(made) == 2


def test_an_environment_that_failed_is_not_taken_for_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made again the next time."""

    def fail(folder: Path, _requirements: Path, _python: str) -> None:
        folder.mkdir()
        raise OSError("no space")

    monkeypatch.setattr(reference_environment, "REFERENCE", tmp_path / "environment")
    monkeypatch.setattr(reference_environment, "make_environment", fail)
    with pytest.raises(OSError, match="no space"):
        install_reference()

    assert not is_installed()
