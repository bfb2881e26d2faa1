"""Model repositories for measurements."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

YOLO = "yolo11n"
"""The detector in measurements."""


class _Fixture(NamedTuple):
    """A simulated detector, which waits without using a CPU, as for a GPU, and has the same result for every image."""

    wait: float
    """Milliseconds for each batch."""
    wait_per_image: float
    max_batch: int
    side: int = 640
    more: str = ""
    """Other lines of its config."""
    variants: Sequence[str] = ()
    """Suffixes of the models like it that take something else."""


_BATCHING = "dynamic_batching { max_queue_delay_microseconds: 0 }\n"
_FP32, _FILE = "_fp32", "_file"
_MASKS = """\
output { name: "det_masks" data_type: TYPE_FP32 dims: [ 300, 32 ] }
output { name: "prototypes" data_type: TYPE_FP16 dims: [ 32, 160, 160 ] }
"""
_FIXTURES = {
    "null": _Fixture(0, 0, 16, more=_BATCHING, variants=(_FP32, _FILE)),
    # A GPU that gains much by batches, and one that gets its images one at a time.
    "sim_gpu": _Fixture(8, 0.5, 32, more=_BATCHING, variants=(_FP32, _FILE)),
    "sim_gpu_batch1": _Fixture(8, 0.5, 1, variants=(_FILE,)),
    # 30 objects, whose masks cover a tenth of an image of 4:3 each.
    "sim_gpu_masks": _Fixture(8, 0.5, 8, more=_BATCHING + _MASKS),
    # At most 20 images a second, one at a time: Triton's batcher lets a queue of batches wait for up to half a second when no
    # request arrives, which would hide what the gateway does.
    "wait_20": _Fixture(0, 50, 1, side=320),
    # At most 50 images a second, in batches. No batcher of its own: its images wait in the gateway for the next call.
    "wait_50_batch8": _Fixture(48, 14, 8, side=320),
}
_INPUTS = {
    "": 'input {{ name: "image" data_type: TYPE_UINT8 dims: [ {side}, {side}, 3 ] }}',
    _FP32: 'input {{ name: "images" data_type: TYPE_FP32 dims: [ 3, {side}, {side} ] }}',
    _FILE: (
        'input {{ name: "file" data_type: TYPE_STRING dims: [ 1 ] }}\n'
        'parameters {{ key: "square" value {{ string_value: "{side}" }} }}'
    ),
}
"""FP32 is for clients such as the reference, which normalise the image themselves; a file is encoded."""
_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: {max_batch}
{input}
output {{ name: "num_dets" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "det_boxes" data_type: TYPE_FP32 dims: [ 300, 4 ] }}
output {{ name: "det_scores" data_type: TYPE_FP32 dims: [ 300 ] }}
output {{ name: "det_classes" data_type: TYPE_INT32 dims: [ 300 ] }}
instance_group [ {{ count: 1 kind: KIND_CPU }} ]
parameters {{ key: "placement" value {{ string_value: "center" }} }}
parameters {{ key: "labels" value {{ string_value: "nothing" }} }}
parameters {{ key: "wait_milliseconds" value {{ string_value: "{wait:g}" }} }}
parameters {{ key: "wait_milliseconds_per_image" value {{ string_value: "{wait_per_image:g}" }} }}
{more}"""
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
    """Write all fixtures and their variants into a model repository."""
    for name in _FIXTURES:
        write_variants(name, repository)


def write_variants(name: str, repository: Path) -> bool:
    """Write a fixture and its variants for FP32 input and for files, as far as they exist; return False if there is none."""
    if name not in _FIXTURES:
        return False
    for variant in ("", *_FIXTURES[name].variants):
        write_fixture(name, repository, variant)
    return True


def write_fixture(name: str, repository: Path, variant: str = "") -> None:
    """Write one of the fixtures into a model repository."""
    values = _FIXTURES[name]._asdict() | {"name": f"{name}{variant}"}
    _write(repository / values["name"], _CONFIG.format(input=_INPUTS[variant].format(**values), **values), "model.py")


def write_embedding(repository: Path, milliseconds: float) -> None:
    """Write `embedding`, a model that waits so long for a batch and returns vectors in clusters, into a model repository."""
    _write(repository / "embedding", _EMBEDDING % milliseconds, "embedding.py", "clusters.py")


def link_model(source: Path, repository: Path, instead: Mapping[Path, str] = MappingProxyType({})) -> None:
    """Add a model to another repository: links to its files, except the replaced ones."""
    for file in (path for path in source.rglob("*") if path.is_file()):
        target = repository / source.name / file.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if file in instead:
            target.write_text(instead[file], encoding="utf-8")
        else:
            target.symlink_to(file.resolve())


def _write(folder: Path, config: str, model: str, *modules: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    shutil.copyfile(_FOLDER / model, folder / "1" / "model.py")
    for module in modules:
        shutil.copyfile(_FOLDER / module, folder / "1" / module)
