"""Models are composed again from the networks in them: with today's names and precision, and the same results."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from app.model.golden import SAMPLE
from app.triton.repository import DESCRIPTION
from app.zoo.add import Request, add, read_options
from app.zoo.configs import HALF
from app.zoo.inference import open_session, run
from app.zoo.rebuild import rebuild
from app.zoo.repository import NETWORK, Repository
from tests.zoo.exported import FEATURES, exported, feature_tensors, head_tensors

SIZE = (256, 128)
NAMES = {0: "door", 1: "window", 2: "gate"}
UNITS = {"yolo": SIZE, "yolov5": SIZE, "end_to_end": SIZE}
NETWORKS = {
    **{head: exported(head_tensors(head, UNITS.get(head, (1, 1))), SIZE, names=NAMES) for head in ("yolo", "rfdetr", "dfine")},
    "half": exported(head_tensors("yolo", SIZE), SIZE, names=NAMES, half=True),
    "single": exported(head_tensors("yolo", SIZE), SIZE, names=NAMES, batch=1),
    **{task: exported(feature_tensors(task, "yolo"), SIZE, names=NAMES, **FEATURES[task]) for task in FEATURES},
    "classifier": exported({"logits": np.array([1.0, 3.0, 2.0])}, SIZE, names=NAMES),
}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def added(
    model: onnx.ModelProto, repository: Repository, name: str = "doors", *, is_production: bool = False, **options: str
) -> Path:
    path = repository.path.with_name("network.onnx")
    onnx.save(model, path)
    request = Request(str(path), name, "MIT", None, read_options(options), is_production=is_production)
    add(request, repository, lambda _: "")
    return repository.path / name


def answers(file: Path) -> dict[str, NDArray[Any]]:
    return run(open_session(file), {"image": np.full((1, *SIZE[::-1], 3), 99, np.uint8)})


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def age(file: Path) -> None:
    """Give a model the names and the outputs of earlier programs."""
    model = onnx.load(file)
    for output in [output for output in model.graph.output if output.name == SAMPLE]:
        model.graph.output.remove(output)
    prefix = next(node.output[0].partition("/")[0] for node in model.graph.node if node.output[0].startswith("network-"))
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [name.replace(f"{prefix}/", "network/") for name in names]
    for named in (*model.graph.node, *model.graph.initializer, *model.graph.value_info):
        named.name = named.name.replace(f"{prefix}/", "network/")
    onnx.save(model, file)


@pytest.mark.parametrize("name", NETWORKS)
def test_model_of_an_earlier_program_keeps_its_answers_and_its_number(repository: Repository, name: str) -> None:
    file = added(NETWORKS[name], repository) / "1" / NETWORK
    age(file)
    before, found = answers(file), repository.load("doors")
    assert found is not None
    with repository.writing():
        repository.write("doors", msgspec.structs.replace(found, golden={}))
    assert rebuild(repository, lambda _: "", is_production=True)
    after = answers(file)
    half = answers(file.with_name(HALF))

    assert repository.load("doors") == found
    assert any(node.output[0].startswith("network-") for node in onnx.load(file).graph.node)
    for output, tensor in before.items():
        np.testing.assert_array_equal(after[output], tensor)
        assert half[output].shape == tensor.shape


def test_model_that_was_rebuilt_is_the_same_when_it_is_rebuilt_again(repository: Repository) -> None:
    """TensorRT keeps its engine."""
    folder = added(NETWORKS["yolo"], repository)
    assert rebuild(repository, lambda _: "", is_production=True)
    before = content(folder)
    assert rebuild(repository, lambda _: "", is_production=False)

    assert content(folder) == before


def test_model_without_a_description_is_left_alone_and_named(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    folder = added(NETWORKS["yolo"], repository)
    (folder / DESCRIPTION).unlink()
    before = content(folder)
    assert rebuild(repository, lambda _: "", is_production=True)

    assert content(folder) == before
    assert "doors has no valid model.toml, and stays as it is" in capsys.readouterr().err


def test_model_whose_answers_would_differ_is_left_alone_with_all_its_versions(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its description is that of the last version, or was edited."""
    folder = added(NETWORKS["yolo"], repository)
    added(exported(head_tensors("yolo", SIZE), SIZE, names=NAMES, version=2), repository)
    (folder / DESCRIPTION).write_text((folder / DESCRIPTION).read_text().replace("iou = 0.7", "iou = 0.1"))
    before = content(folder)
    assert not rebuild(repository, lambda _: "", is_production=True)

    assert content(folder) == before
    assert "doors stays as it is: doors:1 would find something else" in capsys.readouterr().err


def test_model_that_triton_refuses_is_as_before(repository: Repository) -> None:
    folder = added(NETWORKS["yolo"], repository)
    before = content(folder)

    def refuse(_: str) -> str:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        rebuild(repository, refuse, is_production=True)
    assert content(folder) == before


def test_model_with_a_config_of_its_own_is_left_alone(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    folder = added(NETWORKS["yolo"], repository)
    (folder / "config.pbtxt").write_text("# by hand\n", encoding="utf-8")
    before = content(folder)
    assert not rebuild(repository, lambda _: "", is_production=True)

    assert content(folder) == before
    assert "config.pbtxt is not generated from model.toml, and stays as it is" in capsys.readouterr().err


def test_repository_without_models_is_told(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.path.mkdir()
    assert rebuild(repository, lambda _: "", is_production=True)

    assert "there are no models with a description in" in capsys.readouterr().err


def test_name_of_a_model_does_not_meet_that_of_a_folder_for_its_rebuild(repository: Repository) -> None:
    folder = added(NETWORKS["yolo"], repository, "previous")
    assert rebuild(repository, lambda _: "", is_production=True)

    assert (folder / "1" / HALF).is_file()
