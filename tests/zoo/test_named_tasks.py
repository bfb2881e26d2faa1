"""Networks whose task has to be named: detection and recognition of text, embedding. Their inputs may follow the image's size."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import helper

from app.imaging.fit import canvas_size, fit_for
from app.model.spec import ModelSpec
from app.zoo.repository import Repository
from tests.zoo import adding
from tests.zoo.exported import parse

NETWORKS = {
    "text_detection": """
        map (float[batch, 3, height, width] x) => (float[batch, 1, height, width] y) {
            grey = ReduceMean <axes = [1]> (x)
            y = Sigmoid (grey)
        }""",
    "text_recognition": """
        read (float[batch, 3, 48, width] x) => (float[batch, steps, 5] y) {
            parts = AveragePool <kernel_shape = [48, 8], strides = [48, 8]> (x)
            rows = Constant <value_ints = [2]> ()
            colours = Squeeze (parts, rows)
            steps = Transpose <perm = [0, 2, 1]> (colours)
            missing = Constant <value_ints = [0, 0, 1, 0, 0, 1]> ()
            logits = Pad (steps, missing)
            y = Softmax <axis = 2> (logits)
        }""",
    "embedding": """
        describe (float[batch, 3, 64, 64] x) => (float[batch, 3] y) {
            mean = GlobalAveragePool (x)
            y = Flatten (mean)
        }""",
}
CHARACTERS = ("a", "b", "\u3000")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def added(task: str, repository: Repository, *, network: str | None = None, **options: str) -> ModelSpec:
    """Add a network, and return its spec."""
    model = parse(NETWORKS[network or task])
    helper.set_model_props(model, {"character": "\n".join(CHARACTERS)})
    adding.added(model, repository, task=task, **options)
    return adding.spec_of(repository)


def run(repository: Repository, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
    """Run the composed model with images UINT8 (batch, height, width, 3)."""
    session = onnxruntime.InferenceSession(repository.path / "doors/1/model.onnx", providers=["CPUExecutionProvider"])
    found: list[NDArray[Any]] = session.run(None, {"image": images})
    return found


def size_for(spec: ModelSpec, width: int, height: int) -> tuple[int, int]:
    """Return the size of the canvas for an image of this size."""
    fit = fit_for(spec)
    return canvas_size(fit, fit.fit(width, height))


def noise(*shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def test_map_of_text_has_the_size_of_the_image(repository: Repository) -> None:
    """Each probability is rounded to a part of 255, so that more than 0.3 is more than 76 of it."""
    spec = added("text_detection", repository)
    images = noise(2, 96, 160, 3)
    (found,) = run(repository, images)
    normalized = images[..., ::-1] / 127.5 - 1

    assert (spec.head.task, spec.labels, spec.output_names) == ("text_detection", (), ("text_map",))
    assert size_for(spec, 500, 1000) == (736, 1472)
    assert found.dtype == np.uint8
    assert found.shape == (2, 96, 160)
    probability = 1 / (1 + np.exp(-normalized.mean(axis=3)))
    assert np.abs(found - 255 * probability).max() <= 0.51
    clear = np.abs(probability - 0.3) > 1e-5
    assert ((found > 76) == (probability > 0.3))[clear].all()


def test_line_of_text_has_a_class_and_a_score_for_each_step(repository: Repository) -> None:
    """The blank is before the characters, a space after them; a Chinese space is a character of the file."""
    spec = added("text_recognition", repository)
    images = np.full((2, 48, 320, 3), 127, np.uint8)
    images[0, :, :8] = 0, 0, 255
    images[1, :, 8:16] = 255, 0, 0
    classes, scores = run(repository, images)

    assert spec.labels == ("", *CHARACTERS, " ")
    assert (spec.head.task, spec.output_names, spec.widths, spec.pad) == (
        *("text_recognition", ("classes", "scores")),
        *((160, 320, 480, 640, 960, 1280), 127),
    )
    assert size_for(spec, 400, 100) == (320, 48)
    assert (str(classes.dtype), str(scores.dtype), classes.shape, scores.shape) == ("int32", "float32", (2, 40), (2, 40))
    assert [spec.labels[number] for number in (classes[0, 0], classes[1, 1])] == ["a", "\u3000"]  # blue is first
    assert scores[0, 0] == pytest.approx(np.e / (np.e + 2 + 2 / np.e), abs=1e-5)


def test_vector_of_an_image(repository: Repository) -> None:
    spec = added("embedding", repository, mean="0,0,0", std="1,1,1")
    images = noise(3, 64, 64, 3)

    assert (spec.head.task, spec.head.description, spec.resize) == ("embedding", "vector of 3 values", "stretch")
    assert run(repository, images)[0] == pytest.approx(images.mean(axis=(1, 2)) / 255, abs=1e-5)


@pytest.mark.parametrize(
    ("task", "network", "options", "message"),
    [
        ("embedding", "text_detection", {"size": "64"}, r"has the outputs y \(1, 64, 64\), which are not those of a network for"),
        ("text_recognition", None, {"labels": "a,b"}, "has 5 classes, not those of 2 characters: say --labels FILE"),
    ],
)
def test_network_of_another_task_is_refused(
    repository: Repository, task: str, network: str | None, options: dict[str, str], message: str
) -> None:
    with adding.refused(repository, message):
        added(task, repository, network=network, **options)
