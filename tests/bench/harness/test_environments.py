"""The environments of the servers Nereid is measured against, and of Locust."""

from pathlib import Path

import pytest

from bench.harness import environments
from bench.harness.environments import Environment
from bench.harness.errors import ContestantError


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    environment = Environment("reference", "./just bench versus --install")
    environment.folder = tmp_path / "environment"
    return environment


def test_an_environment_is_made_once(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []

    def make(folder: Path, requirements: Path, _python: str) -> None:
        assert requirements.is_file()
        folder.mkdir(exist_ok=True)
        made.append(folder)

    monkeypatch.setattr(environments, "make_environment", make)
    with pytest.raises(ContestantError, match="bench versus --install"):
        environment.python()
    environment.install()
    environment.install()

    assert environment.is_installed()
    assert environment.python() == environment.folder / "bin" / "python"
    assert len(made) == 1

    (environment.folder / "complete").write_text("other requirements")
    environment.install()
    assert len(made) == 2


def test_an_environment_that_failed_is_not_taken_for_complete(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, _requirements: Path, _python: str) -> None:
        folder.mkdir()
        raise OSError("no space")

    monkeypatch.setattr(environments, "make_environment", fail)
    with pytest.raises(OSError, match="no space"):
        environment.install()

    assert not environment.is_installed()
