"""Composed classification models turn what their network returns into probabilities."""

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from app.zoo.compose import compose_model
from app.zoo.recipe import ClassificationRecipe
from tests.zoo.exported import parse

SQUARE = 128
LOGITS = ClassificationRecipe(size=(SQUARE, SQUARE), channels="RGB", scale=1.0, mean=(127.0,) * 3, std=(128.0,) * 3, head="logits")
PROBABILITIES = ClassificationRecipe(size=(SQUARE, SQUARE), channels="BGR", scale=255.0, head="probabilities")


def network(output: str = "float[1, 3] output") -> onnx.ModelProto:
    return parse(f"""
means (float[1, 3, {SQUARE}, {SQUARE}] images) => ({output}) {{
    output = ReduceMean <axes = [2, 3], keepdims = 0> (images)
}}""")


def run(recipe: ClassificationRecipe, *colours: tuple[int, int, int]) -> NDArray[np.float32]:
    """Compose the model and run it on images of one colour each."""
    model = compose_model(network(), recipe)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    images = np.stack([np.full((SQUARE, SQUARE, 3), colour, np.uint8) for colour in colours])
    (answer,) = session.run(["probabilities"], {"image": images})
    return np.asarray(answer, np.float32)


def test_logits_become_probabilities() -> None:
    colours = [(255, 127, 0), (0, 0, 0)]
    logits = (np.array(colours, float) - 127) / 128
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)

    assert run(LOGITS, *colours) == pytest.approx(expected, abs=1e-5)


def test_each_channel_has_its_own_mean_and_deviation() -> None:
    recipe = msgspec.structs.replace(PROBABILITIES, mean=(0.1, 0.2, 0.3), std=(0.5, 1.0, 2.0))

    assert run(recipe, (51, 102, 255)) == pytest.approx(np.array([[1.8, 0.2, -0.05]]), abs=1e-4)


@pytest.mark.parametrize("output", ["float[1, 3, 1, 1] output", "float[3] output", "float[1, 1] output", "float[1, n] output"])
def test_network_with_another_head_is_rejected(output: str) -> None:
    with pytest.raises(ValueError, match="is not a number for each class"):
        compose_model(network(output), LOGITS)
