"""Model repositories for measurements."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from app.model.triton_config import ModelConfig, read_parameters
from app.triton.config_file import read_config_file
from app.triton.repository import config_path

YOLO = "yolo11n"
"""The detector in measurements."""

_FOLDER = Path(__file__).parent
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
    """Copy a pulled model into another repository."""
    shutil.copytree(model, repository / model.name)


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


def read_labels(repository: Path, model: str) -> str:
    """Return the class names of a model, one a line."""
    config = read_config_file(config_path(repository / model, is_embedded=True))
    return "\n".join(read_parameters(msgspec.convert(config, ModelConfig, strict=False)).class_names())
