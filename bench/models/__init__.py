"""Models for measurements alone: a config each, and one implementation that all of them share."""

import shutil
from pathlib import Path

import onnx
from onnx.utils import Extractor

from app import embedded

_FOLDER = Path(__file__).parent
_REAL = "yolo11n"


def write(repository: Path, real: Path | None) -> None:
    """Put the fixtures into a model repository.

    Args:
        repository: Where to.
        real: The project's own repository, to add its `yolo11n` and a twin that takes FP32 planes; None leaves both out.
    """
    for config in sorted(_FOLDER.glob("*/config.pbtxt")):
        version = repository / config.parent.name / "1"
        version.mkdir(parents=True)
        shutil.copyfile(config, version.parent / config.name)
        shutil.copyfile(_FOLDER / "model.py", version / "model.py")
    if real is not None:
        shutil.copytree(real / _REAL, repository / _REAL)
        _write_twin(repository)


def labels(repository: Path, model: str) -> str:
    """Read the class names of a model in `repository`, comma separated."""
    folder = repository / model
    own = folder / "configs" / f"{embedded.CONFIG_NAME}.pbtxt"
    text = (own if own.is_file() else folder / "config.pbtxt").read_text(encoding="utf-8")
    return text.partition('key: "labels" value { string_value: "')[2].partition('"')[0]


def _write_twin(repository: Path) -> None:
    """Cut the first nodes off the composed network, so that it takes what the reference's kind of client sends."""
    network = onnx.load(repository / _REAL / "1" / "model.onnx")
    inner = "before/pixels"
    twin = Extractor(network).extract_model([inner], [output.name for output in network.graph.output])
    del twin.opset_import[1:]  # one for each graph that was merged, all the same
    twin.graph.input[0].name = "images"
    for node in twin.graph.node:
        for index, name in enumerate(node.input):
            if name == inner:
                node.input[index] = "images"
    name = f"{_REAL}_fp32"
    (repository / name / "1").mkdir(parents=True)
    onnx.save(twin, repository / name / "1" / "model.onnx")
    text = (repository / _REAL / "configs" / f"{embedded.CONFIG_NAME}.pbtxt").read_text(encoding="utf-8")
    text = text.replace(f'name: "{_REAL}"', f'name: "{name}"').replace("TYPE_UINT8", "TYPE_FP32")
    text = text.replace('name: "image"', 'name: "images"').replace('key: "image"', 'key: "images"')
    text = text.replace("[ 640, 640, 3 ]", "[ 3, 640, 640 ]")
    (repository / name / "config.pbtxt").write_text(text, encoding="utf-8")
