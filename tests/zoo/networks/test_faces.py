"""The models of faces find and describe what their networks do by themselves."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from app.embedded.server import EmbeddedTriton
from app.imaging.fit import fit_for
from app.main import create_app
from app.settings.schema import Settings
from app.zoo import registry
from app.zoo.compose import compose_model
from app.zoo.inference import open_session, run
from app.zoo.networks.centerface import load
from app.zoo.networks.dlib_resnet import build_network, read_weights
from app.zoo.recipe import PoseRecipe
from bench.experiments.faces import DESCRIPTION, DETECTION, Found, find_alone, largest_difference, open_models, open_network
from tests.conftest import fetched
from tests.support import IMAGES, SHARED, started, triton_home
from tests.support import json as content

FIGURES = {0: -0.048932, 1: 0.117265, 17: -0.073802, 63: -0.109619, 90: 0.059961, 127: 0.022531}
"""Values of the vector of `ramps` by their index, from face-api with its TensorFlow.js backend `cpu`."""


@pytest.fixture(scope="module")
def files() -> dict[str, Path]:
    """The published files, each with what belongs beside it; downloaded once."""
    return fetched(registry.select(registry.load(), "faces"))


def write_tiny_centerface(path: Path) -> Path:
    """Write a network of one random convolution that is published as CenterFace is: old, with weights as inputs, for 32 x 32."""
    generator = np.random.default_rng(1)
    kernel = generator.normal(0, 0.002, (15, 3, 4, 4)).astype(np.float32)
    kernel -= kernel.mean(axis=(1, 2, 3), keepdims=True)
    kernel[0] *= 3
    bias = np.array([-10, 3, 3, 0, 0, *generator.uniform(0, 1, 10)], np.float32)
    weights: dict[str, NDArray[Any]] = {"kernel": kernel, "bias": bias, "batches": np.array(3, np.int64)}
    inputs = [helper.make_tensor_value_info("input.1", TensorProto.FLOAT, [10, 3, 32, 32])]
    inputs += [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)
        for name, values in weights.items()
    ]
    nodes = [
        helper.make_node("Conv", ["input.1", "kernel", "bias"], ["maps"], strides=[4, 4]),
        helper.make_node("Split", ["maps"], ["logits", "538", "539", "540"], axis=1, split=[1, 2, 2, 10]),
        helper.make_node("Sigmoid", ["logits"], ["537"]),
    ]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [10, planes, 8, 8])
        for name, planes in {"537": 1, "538": 2, "539": 2, "540": 10}.items()
    ]
    tensors = [numpy_helper.from_array(values, name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, tensors)
    onnx.save(helper.make_model(graph, ir_version=4, opset_imports=[helper.make_opsetid("", 9)]), path)
    return path


def test_boxes_and_landmarks_are_those_of_the_networks_own_decoding(tmp_path: Path) -> None:
    file = write_tiny_centerface(tmp_path / "tiny.onnx")
    recipe = registry.load()[DETECTION].recipe
    assert isinstance(recipe, PoseRecipe)
    model, alone = open_session(compose_model(load(file), recipe, classes=1)), open_network(file)
    noise = np.random.default_rng(2).integers(0, 256, (2, 640, 640, 3), np.uint8)

    outputs = run(model, {"image": noise})

    for index, canvas in enumerate(noise):
        expected = find_alone(alone, canvas, recipe.floor)
        count = outputs["num_dets"][index, 0]
        found = Found(*(outputs[name][index, :count] for name in ("det_boxes", "det_scores", "det_keypoints")))
        assert 10 < count < 300
        assert largest_difference(found, expected) < 0.01
        assert (np.abs(found.boxes - np.clip(found.boxes, 0, 640)) == 0).all()


def test_weights_are_read_as_their_manifest_says(tmp_path: Path) -> None:
    kernel = np.arange(3 * 3 * 2 * 4, dtype=np.uint8).reshape(3, 3, 2, 4)
    coding = {"dtype": "uint8", "scale": 0.5, "min": -10.0}
    entries = [
        {"name": "a/filters", "shape": kernel.shape, "dtype": "float32", "quantization": coding},
        {"name": "b", "shape": [2], "dtype": "float32"},
    ]
    numbers, manifest = tmp_path / "weights.bin", tmp_path / "manifest.json"
    numbers.write_bytes(kernel.tobytes() + np.array([1.5, -2], np.float32).tobytes())
    manifest.write_text(json.dumps([{"weights": entries, "paths": ["weights.bin"]}]))
    weights = read_weights(numbers, manifest)

    assert weights["a/filters"].shape == (4, 2, 3, 3)
    assert weights["a/filters"][1, 0, 2, 1] == kernel[2, 1, 0, 1] * 0.5 - 10
    assert weights["b"].tolist() == [1.5, -2]
    numbers.write_bytes(kernel.tobytes())
    with pytest.raises(ValueError, match="not weights with their manifest"):
        read_weights(numbers, manifest)


def ramps() -> NDArray[np.float32]:
    """Make pixels (150, 150, 3) that need no decoder."""
    y, x = np.indices((150, 150))
    return np.stack([x + 50, y + 50, (x * y) % 256], axis=-1).astype(np.float32)


@pytest.mark.system
def test_description_is_that_of_the_reference(files: dict[str, Path]) -> None:
    """face-api divides by 255, dlib, whose weights these are, by 256: so the network is compared without what comes before it."""
    file = files[DESCRIPTION]
    weights = read_weights(file, file.with_name("face_recognition_model-weights_manifest.json"))
    planes = (ramps() - np.array([122.782, 117.001, 104.298], np.float32)) / 255

    (vector,) = run(open_session(build_network(weights)), {"images": planes.transpose(2, 0, 1)[None]}).values()

    assert {index: vector[0, index] for index in FIGURES} == pytest.approx(FIGURES, abs=1e-5)


@pytest.mark.system
async def test_gateway_finds_the_faces_that_the_network_finds(
    settings: Settings, tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]
) -> None:
    """Their boxes and landmarks are within two pixels of the model's input, also where a photo is decoded at a reduced size."""
    folder = tmp_path_factory.mktemp("faces")
    models, alone = open_models(folder / "models", files), open_network(files[DETECTION])
    own = msgspec.structs.replace(
        settings, model_repository=str(folder / "models"), triton_home=triton_home(folder), model=DETECTION
    )
    triton, faces = EmbeddedTriton(own), 0
    triton.start()
    try:
        async with started(create_app(own)) as client:
            for path in sorted((*IMAGES.glob("*.jpg"), *(SHARED / "images").glob("*.jpg"))):
                picture = np.asarray(Image.open(path).convert("RGB"))
                transform = fit_for(models.detector_spec).fit(picture.shape[1], picture.shape[0])
                expected = find_alone(alone, models.canvas(picture), _LESS)
                size = np.array([transform.image_width, transform.image_height])
                points = np.clip(transform.points_to_image(expected.landmarks), 0, size)
                expected = Found(transform.to_image(expected.boxes), expected.scores, points)
                params: dict[str, str | float] = {"confidence": _LESS, "max_detections": 300, "boxes": "pixel"}
                answer = await client.post(f"/predict/{DETECTION}", content=path.read_bytes(), params=params)
                found = to_faces(content(answer)["detections"])
                tolerance = 2 * transform.image_width / transform.width
                assert contains(found, expected, tolerance), path.name
                assert contains(expected, found, tolerance), path.name
                faces += int((found.scores >= _SURE).sum())
    finally:
        triton.stop()
    assert faces


_LESS, _SURE = 0.4, 0.5


def to_faces(detections: list[dict[str, Any]]) -> Found:
    boxes = [[one[side] for side in ("x1", "y1", "x2", "y2")] for one in detections]
    points = [[[point["x"], point["y"]] for point in one["keypoints"]] for one in detections]
    scores = [one["confidence"] for one in detections]
    return Found(*(np.array(values, np.float32) for values in (boxes, scores, points)))


def contains(one: Found, other: Found, tolerance: float) -> bool:
    """Return whether faces include all those of another result that are sure; less sure ones may be missing."""
    return all(
        any(
            np.abs(box - own_box).max() <= tolerance and np.abs(points - own_points).max() <= tolerance
            for own_box, _, own_points in zip(*one, strict=True)
        )
        for box, score, points in zip(*other, strict=True)
        if score >= _SURE
    )
