"""Model repositories for measurements."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import onnx
from onnx.utils import Extractor

from app.model.triton_config import ModelConfig, read_parameters
from app.triton.config_file import read_config_file
from app.triton.repository import CONFIG_NAME, config_path
from app.zoo import description
from app.zoo.repository import NETWORK

YOLO = "yolo11n"
"""The detector in measurements."""
CLASSIFIER = "efficientnet_lite0"
"""The classifier in measurements."""

_FOLDER = Path(__file__).parent
# The tensor between preprocessing and network in a composed model, named in app/zoo/compose.py.
_PIXELS = "before/pixels"
_EMBEDDING = """
name: "embedding"
backend: "python"
max_batch_size: 8
input { name: "image" data_type: TYPE_UINT8 dims: [ 256, 256, 3 ] }
output { name: "vector" data_type: TYPE_FP32 dims: [ 512 ] }
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "task" value { string_value: "embedding" } }
parameters { key: "resize" value { string_value: "stretch" } }
parameters { key: "wait_milliseconds" value { string_value: "%g" } }
"""


def write_models(repository: Path) -> None:
    """Write all fixtures into a model repository."""
    for config in sorted(_FOLDER.glob("*/config.pbtxt")):
        write_fixture(config.parent.name, repository)


def write_variants(name: str, repository: Path) -> bool:
    """Write a fixture and its variants for FP32 input and for files, as far as they exist; return False if there is none."""
    found = [one for one in (name, f"{name}_fp32", f"{name}_file") if (_FOLDER / one / "config.pbtxt").is_file()]
    for one in found:
        write_fixture(one, repository)
    return bool(found)


def copy_model(model: Path, repository: Path) -> None:
    """Copy a pulled model into another repository; of `yolo11n` also write a variant that takes FP32 planes."""
    shutil.copytree(model, repository / model.name)
    if model.name == YOLO:
        _write_fp32_variant(repository)


def write_fixture(name: str, repository: Path) -> None:
    """Write one of the fixtures into a model repository."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    shutil.copyfile(_FOLDER / name / "config.pbtxt", version.parent / "config.pbtxt")
    shutil.copyfile(_FOLDER / "model.py", version / "model.py")


def write_embedding(repository: Path, milliseconds: float) -> None:
    """Write `embedding`, a model that waits so long for a batch and returns vectors in clusters, into a model repository."""
    version = repository / "embedding" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_EMBEDDING % milliseconds, encoding="utf-8")
    shutil.copyfile(_FOLDER / "embedding.py", version / "model.py")
    shutil.copyfile(_FOLDER / "clusters.py", version / "clusters.py")


def write_model(source: Path, repository: Path, instead: Mapping[Path, str]) -> None:
    """Add a model to another repository: links to its files, except the replaced ones."""
    for file in (path for path in source.rglob("*") if path.is_file()):
        target = repository / source.name / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file in instead:
            target.write_text(instead[file], encoding="utf-8")
        else:
            target.symlink_to(file.resolve())


def network_of(folder: Path) -> Path:
    """Return the file of a model's default version; a model that was removed and pulled again has another one than the first."""
    added = description.load(folder)
    return folder / str(added.default_version if added else 1) / NETWORK


def read_labels(repository: Path, model: str) -> str:
    """Return the class names of a model, one a line."""
    config = read_config_file(config_path(repository / model, is_embedded=True))
    return "\n".join(read_parameters(msgspec.convert(config, ModelConfig, strict=False)).class_names())


def _write_fp32_variant(repository: Path) -> None:
    """Write `yolo11n` without its first nodes, so that it takes FP32 planes, as the reference sends them."""
    network = onnx.load(network_of(repository / YOLO))
    variant = Extractor(network).extract_model([_PIXELS], [output.name for output in network.graph.output])
    del variant.opset_import[1:]  # one per merged graph, all identical
    variant.graph.input[0].name = "images"
    for node in variant.graph.node:
        for index, name in enumerate(node.input):
            if name == _PIXELS:
                node.input[index] = "images"
    folder = repository / f"{YOLO}_fp32"
    (folder / "1").mkdir(parents=True)
    onnx.save(variant, folder / "1" / "model.onnx")
    text = (repository / YOLO / "configs" / f"{CONFIG_NAME}.pbtxt").read_text(encoding="utf-8")
    text = text.replace(f'name: "{YOLO}"', f'name: "{folder.name}"').replace("TYPE_UINT8", "TYPE_FP32")
    text = text.replace('name: "image"', 'name: "images"').replace('key: "image"', 'key: "images"')
    text = text.replace("[ 640, 640, 3 ]", "[ 3, 640, 640 ]")
    (folder / "config.pbtxt").write_text(text, encoding="utf-8")
