"""Every graph that is composed for production, as NVIDIA's parser and compiler see it."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import onnx
import pytest

from app.zoo import registry
from app.zoo.compose import compose_model, load_network
from app.zoo.half import to_half
from app.zoo.recipe import DetectionHeadName, DetectionRecipe, Recipe
from app.zoo.recognize import Options, recognize
from bench.harness.environments import TENSORRT_RTX
from tests.conftest import fetched
from tests.support import ROOT
from tests.zoo.exported import FEATURES, WIDE, exported, feature_tensors, head_tensors

ENTRIES = registry.load()
PIXEL_MODELS = [name for name, entry in ENTRIES.items() if not entry.pixel_model]
CLASSES = {0: "a", 1: "b", 2: "c"}

pytestmark = pytest.mark.skipif(not TENSORRT_RTX.is_installed(), reason=TENSORRT_RTX.missing)

precisions = pytest.mark.parametrize("half", [False, True], ids=["FP32", "FP16"])


def examine(model: onnx.ModelProto, recipe: Recipe, folder: Path) -> Mapping[str, Any]:
    """Return what the program finds in a model."""
    width, height = recipe.size
    program, file = ROOT / "tests/system/examine_onnx.py", folder / "model.onnx"
    onnx.save(model, file)
    command = [str(part) for part in (TENSORRT_RTX.python(), program, width, height, file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def files(networks: dict[str, Path], text_networks: dict[str, Path]) -> dict[str, Path]:
    """The published networks, as far as they are available."""
    return (
        networks | text_networks | fetched({name: ENTRIES[name] for name in ("embedding", "faces_detection", "faces_description")})
    )


@precisions
@pytest.mark.parametrize("head", get_args(DetectionHeadName))
def test_graph_of_every_head_compiles(head: DetectionHeadName, half: bool, tmp_path: Path) -> None:  # noqa: FBT001
    tensors = head_tensors(head, WIDE if head in ("yolo", "yolov5", "end_to_end") else (1, 1))
    recipe = DetectionRecipe(size=WIDE, head=head)
    network = exported(tensors, WIDE)
    found = examine(compose_model(to_half(network) if half else network, recipe, classes=3), recipe, tmp_path)

    assert (found["parser"], found["compiler"]) == ([], [])


@precisions
@pytest.mark.parametrize("head", ["yolo", "end_to_end"])
@pytest.mark.parametrize("task", FEATURES)
def test_graph_of_every_task_compiles(task: str, head: str, half: bool, tmp_path: Path) -> None:  # noqa: FBT001
    network = exported(feature_tensors(task, head), WIDE, names=CLASSES, **FEATURES[task])
    recognized = recognize(network, Options())
    found = examine(compose_model(to_half(network) if half else network, recognized.recipe), recognized.recipe, tmp_path)

    assert (found["parser"], found["compiler"]) == ([], [])


@precisions
@pytest.mark.parametrize("name", PIXEL_MODELS)
def test_published_model_compiles(name: str, half: bool, files: dict[str, Path], tmp_path: Path) -> None:  # noqa: FBT001
    """With 95 % of the convolutions in its precision, at least."""
    if name not in files:
        pytest.skip(f"the published network of {name} is not available here")
    recipe = ENTRIES[name].recipe
    network = load_network(files[name], recipe.architecture)
    found = examine(compose_model(to_half(network) if half else network, recipe), recipe, tmp_path)

    assert (found["parser"], found["compiler"]) == ([], [])
    assert found["convolutions"]["HALF" if half else "FLOAT"] >= 0.95 * sum(found["convolutions"].values()) > 0


def test_compiler_refuses_what_the_documentation_says(networks: dict[str, Path], tmp_path: Path) -> None:
    """A model for the evaluation of AP compares more pairs than TensorRT sorts."""
    recipe = ENTRIES["yolo11n"].vary({"multi_label": True}).recipe
    found = examine(compose_model(onnx.load(networks["yolo11n"]), recipe), recipe, tmp_path)

    assert found["parser"] == []
    assert "K exceeds the maximum value allowed (3840)" in found["compiler"][0]
