"""What production runs of a network: a model in FP16 where it finds the same, and a fingerprint that changes with what is found."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from app.detection.nms import Candidates
from app.features.cache import networks
from app.features.cache.networks import CLEARED
from app.triton.config_file import read_config_file
from app.triton.repository import DESCRIPTION, identify
from app.zoo import check, description, registry
from app.zoo.add import Request, add, spec_of
from app.zoo.build import agreement, build, extract, strip_floor
from app.zoo.configs import HALF
from app.zoo.description import Description, Serving
from app.zoo.half import keep_rounding
from app.zoo.inference import open_session
from app.zoo.pull import pull
from app.zoo.recipe import DetectionRecipe
from app.zoo.recognize import read_options
from app.zoo.repository import NETWORK, Repository
from tests.conftest import fetched
from tests.support import IMAGES, SHARED
from tests.zoo.adding import new_repository  # noqa: F401 - a fixture
from tests.zoo.exported import WIDE, head_tensors, parse

TEXT, FACES = ("ocr_detection", "ocr_direction", "ocr_recognition"), ("faces_detection", "faces_description")


def network(weight: float = 0.25, width: int = 8) -> onnx.ModelProto:
    """Make a network with convolutions by a weight and by its reciprocal; it finds the same in every image."""
    model = parse(f"""network (float[batch, 3, {WIDE[1]}, {WIDE[0]}] images) => (float[batch, 7, 672] output0) {{
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
        "head": head_tensors("yolo")["output0"][None].astype(np.float32),
    }
    model.graph.initializer.extend(numpy_helper.from_array(values, name) for name, values in tensors.items())
    return model


def added(model: onnx.ModelProto, repository: Repository, *, is_production: bool = False) -> None:
    onnx.save(model, path := repository.path.with_name("doors.onnx"))
    options = read_options({"labels": "door,window,gate"})
    add(Request(str(path), None, "MIT", None, options, is_production=is_production), repository, lambda _: "")


def production_file(repository: Repository, name: str = "doors") -> str:
    """Return the file that the config for production names, which exists in each version."""
    file = str(read_config_file(repository.path / name / "config.pbtxt").get("default_model_filename", NETWORK))
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


def test_agreement_is_the_f1_of_boxes_that_are_alike() -> None:
    boxes = np.array([[0, 0, 10, 10], [20, 20, 40, 40]], np.float32)
    found = Candidates(boxes, np.array([0.9, 0.8], np.float32), np.array([0, 1], np.int32))

    for kept, f1 in (([0, 1], 1.0), ([0], 2 / 3), ([], 0.0)):
        assert check.agreement(found, found.take(np.array(kept, np.intp)), 0.5, 0.1) == pytest.approx(f1)
    assert check.agreement(found, found._replace(class_ids=found.class_ids[::-1]), 0.5, 1.0) == 0


DOORS = Description(
    labels=("door",),
    default_version=1,
    recipe=DetectionRecipe(size=(64, 64), head="yolo"),
    versions={"1": "aa", "2": "bb"},
    last_version=2,
)


class Doors:
    """A repository with the model `doors`, of which Triton has loaded what a test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path / "doors"
        for version in ("1", "2"):
            (self.folder / version).mkdir(parents=True)
            self.network(version).write_bytes(b"network " + version.encode())
        self.describe()
        self.loaded = identify(self.folder)

    def network(self, version: str = "1") -> Path:
        return self.folder / version / "model.onnx"

    def describe(self, **changes: Any) -> None:  # noqa: ANN401
        (self.folder / DESCRIPTION).write_text(description.dump(msgspec.structs.replace(DOORS, **changes)), encoding="utf-8")

    def load(self) -> None:
        self.loaded = identify(self.folder)

    def read(self, version: str = "1", name: str = "doors") -> bytes:
        return networks.read(self.path, lambda _, identity: identity == self.loaded, name, version)


@pytest.fixture
def doors(tmp_path: Path) -> Doors:
    return Doors(tmp_path)


def replace_with_the_old_time(doors: Doors) -> None:
    """Of the same size, and with the times that the file had."""
    status = doors.network().stat()
    doors.network().write_bytes(b"network 9")
    os.utime(doors.network(), ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        replace_with_the_old_time,
        lambda doors: doors.network().with_name("new").replace(doors.network()),
        lambda doors: (doors.folder / "2" / HALF).write_bytes(b"half 2"),  # then version 1 runs in FP16, too
        lambda doors: doors.describe(recipe=msgspec.structs.replace(DOORS.recipe, iou=0.5)),
    ],
    ids=["network", "renamed network", "precision", "recipe"],
)
def test_change_makes_a_new_fingerprint_once_it_is_loaded(doors: Doors, change: Callable[[Doors], object]) -> None:
    doors.network().with_name("new").write_bytes(b"network 9")
    (doors.folder / "1" / HALF).write_bytes(b"half 1")
    doors.load()
    before = doors.read()
    assert doors.read() == before != b""
    change(doors)
    assert doors.read() == b""
    doors.load()

    assert doors.read() not in {b"", before}


def test_copies_and_other_ways_to_run_have_the_same_fingerprint(doors: Doors) -> None:
    """Hosts may run the same network in different ways, and have copies of it; Python caches byte code. Versions differ."""
    before = doors.read()
    (doors.folder / "1" / "__pycache__").mkdir()
    (doors.folder / "1" / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"byte code")
    assert doors.read() == before != doors.read("2")
    assert doors.read("3") == b""
    doors.describe(production=Serving(max_batch=8), licence="MIT")
    content = doors.network().read_bytes()
    doors.network().unlink()
    doors.network().write_bytes(content)
    doors.load()
    assert doors.read() == before

    (doors.path / CLEARED).touch()
    assert doors.read() not in {b"", before}


@pytest.mark.parametrize("text", ["no = TOML = at all", None])
def test_without_a_valid_description_nothing_is_known(doors: Doors, text: str | None) -> None:
    """Nor of a model that runs the network of another one: its own files would not tell that the other one has changed."""
    doors.describe(pixel_model="gates")
    doors.load()
    assert doors.read() == b""
    if text is None:
        (doors.folder / DESCRIPTION).unlink()
    else:
        (doors.folder / DESCRIPTION).write_text(text, encoding="utf-8")
    doors.load()
    assert doors.read() == doors.read(name="gates") == b""


def test_network_that_changes_while_it_is_read_has_none(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    load = description.load

    def load_slowly(folder: Path) -> Description | None:
        found = load(folder)
        doors.network().write_bytes(b"network 9")
        return found

    monkeypatch.setattr(description, "load", load_slowly)
    assert doors.read() == b""
