"""The model in FP16 for production: made where it finds the same, and run where each version has it."""

import hashlib
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from app.triton.config_file import read_config_file
from app.zoo import check, registry
from app.zoo.add import Request, add, read_options, spec_of
from app.zoo.build import agreement, build, extract, strip_floor
from app.zoo.configs import HALF
from app.zoo.half import keep_rounding, to_half
from app.zoo.inference import open_session, run
from app.zoo.pull import pull
from app.zoo.repository import NETWORK, Repository
from tests.conftest import fetched
from tests.support import IMAGES, SHARED
from tests.zoo.exported import head_tensors, parse

SIZE = (256, 128)
TEXT, FACES = ("ocr_detection", "ocr_direction", "ocr_recognition"), ("faces_detection", "faces_description")


def network(weight: float = 0.25, width: int = 8) -> onnx.ModelProto:
    """Make a network with convolutions by a weight and by its reciprocal; it finds the same in every image."""
    model = parse(f"""network (float[batch, 3, {SIZE[1]}, {SIZE[0]}] images) => (float[batch, 7, 672] output0) {{
        hidden = Conv (images, weights)
        seen = Conv (hidden, reciprocals)
        mean = ReduceMean <axes = [1, 2, 3], keepdims = 1> (seen)
        one = Squeeze (mean, axes)
        nothing = Sub (one, one)
        plane = Unsqueeze (nothing, others)
        output0 = Add (plane, head)
    }}""")
    tensors = {
        "weights": np.full((width, 3, 1, 1), weight, np.float32),
        "reciprocals": np.full((3, width, 1, 1), 1 / weight, np.float32),
        "axes": np.array([2, 3]),
        "others": np.array([2]),
        "head": head_tensors("yolo", SIZE)["output0"][None].astype(np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in tensors.items())
    return model


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def added(model: onnx.ModelProto, repository: Repository, *, is_production: bool = False) -> None:
    onnx.save(model, path := repository.path.with_name("doors.onnx"))
    options = read_options({"labels": "door,window,gate"})
    add(Request(str(path), None, "MIT", None, options, is_production=is_production), repository, lambda _: "")


def production_file(repository: Repository, name: str = "doors") -> str:
    """Return the file that the config for production names, which exists in each version."""
    config = read_config_file(repository.path / name / "config.pbtxt")
    file = str(config.get("default_model_filename", NETWORK))
    assert all((repository.path / name / version / file).is_file() for version in repository.models()[name].versions)
    return file


def test_production_gets_a_graph_whose_network_is_in_fp16(repository: Repository) -> None:
    added(network(), repository, is_production=True)
    single, half = (onnx.load(repository.path / "doors" / "1" / name) for name in (NETWORK, HALF))
    weights = {tensor.data_type for tensor in half.graph.initializer if tensor.name.endswith(("weights", "reciprocals"))}

    assert production_file(repository) == HALF
    assert weights == {TensorProto.FLOAT16}
    assert (half.graph.input, half.graph.output) == (single.graph.input, single.graph.output)
    assert half.graph.name != single.graph.name
    assert "filename" not in (repository.path / "doors" / "configs" / "embedded.pbtxt").read_text()
    added(network(0.5), repository)  # all versions have one config, which names one file
    assert production_file(repository) == HALF


def test_production_that_stays_in_fp32_is_told_with_what_changes_it(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    added(network(0.25), repository)
    assert not (repository.path / "doors" / "1" / HALF).exists()
    added(network(0.5), repository, is_production=True)
    assert production_file(repository) == NETWORK
    assert "production runs doors in FP32 until its other versions are in FP16, too: add their networks" in capsys.readouterr().err
    added(network(0.25), repository, is_production=True)

    assert production_file(repository) == HALF
    assert repository.models()["doors"].default_version == 2


def test_network_that_overflows_in_fp16_stays_in_fp32(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    """Its values of up to 180,000 are infinite in FP16; ONNX Runtime on a CPU computes them in FP32, and would not see it."""
    added(network(), repository, is_production=True)
    added(network(60_000, width=1), repository)
    assert production_file(repository) == NETWORK
    assert "warning: doors:2 has no model in FP16, so that production runs FP32" in capsys.readouterr().err
    with repository.writing():
        repository.use("doors:1")
        repository.remove("doors:2")

    assert production_file(repository) == HALF


def test_precision_is_kept_behind_the_last_convolution() -> None:
    """In FP16, coordinates of 256 pixels and more are off by up to an eighth of a pixel."""
    model = network()
    expected, found = (
        run(session, {"images": np.ones((1, 3, *SIZE[::-1]), np.float32)})["output0"]
        for session in (open_session(model), open_session(keep_rounding(to_half(model)), optimizes=False))
    )

    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.system
@pytest.mark.parametrize("name", ["yolo11n", "yolox_nano", "efficientnet_lite0", *TEXT, *FACES])
def test_published_model_finds_the_same_in_fp16(
    networks: dict[str, Path], repository: Repository, tmp_path: Path, name: str
) -> None:
    """In forty images, where they are beside the repository; none has text."""
    entry = registry.load()[name]
    if name not in networks and entry.url:
        pytest.skip(f"the published network of {name} is not available here")
    file = networks.get(name) or fetched({name: entry})[name]
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    pull(name, entry, repository, source=file, sha256=digest, is_production=True)
    found = repository.models()[name]
    content, recognized = extract(repository.path / name / "1" / NETWORK, found)
    single, half = (build(content, strip_floor(recognized), batch=1, is_half=is_half) for is_half in (False, True))
    sizes = [(repository.path / name / "1" / path).stat().st_size for path in (HALF, NETWORK)]
    folder = SHARED / "images" if (SHARED / "images").is_dir() and name not in TEXT else IMAGES

    assert production_file(repository, name) == HALF
    spec = spec_of(name, found, tmp_path)
    assert agreement(single, half, check.draw_samples(folder, spec)) >= 0.99
    rounded = open_session(keep_rounding(onnx.load(repository.path / name / "1" / HALF)), optimizes=False)
    assert found.golden["1"].difference(check.golden(rounded, spec)) == ""
    assert sizes[0] / sizes[1] < (0.53 if sizes[1] > 1e6 else 0.8)  # names of nodes are most of a tiny network
