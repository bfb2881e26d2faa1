"""The network built here answers as another implementation does."""

import hashlib
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from app.main import create_app
from app.settings.schema import Settings
from app.zoo import registry
from app.zoo.networks.efficientnet import build_lite0
from app.zoo.networks.torch_weights import read_weights
from tests.support import IMAGES, SHARED, json, started
from tests.zoo.networks.efficientnet_figures import GRADIENTS, PHOTOS, Figure, gradients

NAME = "efficientnet_lite0"
SHOWN = {
    "000000000776.jpg": "teddy bear",
    "000000001818.jpg": "zebra",
    "000000003661.jpg": "banana",
    "000000007108.jpg": "African bush elephant",
    "000000008762.jpg": "traffic light",
    "000000009448.jpg": "umbrella",
    "chelsea.jpg": "a cat having a striped coat",
    "coffee.jpg": "espresso",
}
"""What is in some of the photos, in the words of the labels."""

TOLERANCE = 0.005
"""Another version of Pillow rounds a few values of a photo differently, by one."""

Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module")
def model(repository: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(repository / NAME / "1" / "model.onnx", providers=["CPUExecutionProvider"])


def probabilities(model: onnxruntime.InferenceSession, *images: Bytes) -> NDArray[np.float32]:
    """Run the model; returns (images, classes)."""
    (answer,) = model.run(["probabilities"], {"image": np.stack(images)})
    return np.asarray(answer, np.float32)


def find(figure: Figure) -> Path | None:
    """Find a photo; None if it is one of the shared ones, and they are not here."""
    path = next((path for path in (IMAGES / figure.image, SHARED / "images" / figure.image) if path.is_file()), None)
    assert path is None or hashlib.sha256(path.read_bytes()).hexdigest().startswith(figure.sha256), (
        "the figures are of another file"
    )
    return path


def test_pixels_without_a_decoder_have_the_probabilities_of_the_reference(model: onnxruntime.InferenceSession) -> None:
    """Only the order of summation differs from the reference."""
    (found,) = probabilities(model, gradients())

    assert np.argsort(-found)[:5].tolist() == list(GRADIENTS)
    assert found[list(GRADIENTS)] == pytest.approx(np.array(list(GRADIENTS.values())), abs=5e-6)


def test_labels_name_what_is_in_the_photos() -> None:
    labels = registry.load()[NAME].class_names

    assert {figure.image: labels[next(iter(figure.top))] for figure in PHOTOS if figure.image in SHOWN} == SHOWN


@pytest.mark.usefixtures("triton")
async def test_the_gateway_answers_the_same(settings: Settings) -> None:
    """It decodes and crops photos as the reference does. Those in ../shared/images are tested where they are."""
    photos = [(figure, path) for figure in PHOTOS if (path := find(figure)) is not None]
    async with started(create_app(settings)) as client:
        for figure, path in photos:
            response = await client.post("/classify", content=path.read_bytes(), params={"top_k": 1000})
            found = {one["class_id"]: one["confidence"] for one in json(response)["classifications"]}
            assert [found[id_] for id_ in figure.top] == pytest.approx(list(figure.top.values()), abs=TOLERANCE), figure.image


def test_missing_weights_are_named(networks: dict[str, Path]) -> None:
    missing = "_blocks.15._bn2.running_var"
    weights = read_weights(networks[NAME])
    del weights[missing]

    with pytest.raises(ValueError, match=f"'{missing}' is missing"):
        build_lite0(weights)
