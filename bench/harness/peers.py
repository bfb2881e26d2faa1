"""Whole servers of one detector: Nereid with its embedded Triton, and what one could use instead."""

import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

import msgspec

from app.model.spec import from_triton_config
from app.settings.schema import Settings
from app.triton.config_file import read_config_file
from app.zoo import registry
from app.zoo.download import download
from bench.harness.environments import PEERS, ROBOFLOW
from bench.harness.errors import ContestantError
from bench.harness.lineup import Contestant, Contestants
from bench.harness.ports import find_free
from bench.harness.processes import variables
from bench.harness.triton import link_installation, pulled
from bench.models.repository import link_model

SAME_ENGINE = ("plain", "plain_default", "litserve", "nereid_same")
"""On ONNX Runtime, with squares. `plain` has a process of one thread per core; `plain_default` one process for all cores."""
AT_ITS_BEST = ("plain_openvino", "litserve_openvino", "roboflow", "nereid")
"""`roboflow` has one process, as in its container; it runs the network that Nereid's model is composed of."""
PACKAGE = "package"
"""The name of Roboflow's model."""

_SAME: Mapping[str, str] = MappingProxyType({"NEREID_SHAPES": "square"})
"""Nereid's settings for the canvas of the others; its engine is theirs, ONNX Runtime."""
_OFFLINE = {
    "ALLOW_INFERENCE_MODELS_DIRECTLY_ACCESS_LOCAL_PACKAGES": "True",
    "OFFLINE_MODE": "True",
    "ONNXRUNTIME_EXECUTION_PROVIDERS": "[CPUExecutionProvider]",
    "PRELOAD_MODELS": PACKAGE,
}
_SIDE = {"height": 640, "width": 640}
_LETTERBOX = {"resize_mode": "letterbox", "padding_value": 114, "dynamic_spatial_size_supported": False}
_INPUT = {"training_input_size": _SIDE, "color_mode": "rgb", "input_channels": 3, "scaling_factor": 255, **_LETTERBOX}
_PACKAGE_FILES = {
    "model_config.json": {"model_architecture": "yolov8", "task_type": "object-detection", "backend_type": "onnx"},
    "inference_config.json": {"network_input": _INPUT, "post_processing": {"type": "nms", "fused": False}},
}


class Peers(Contestants):
    """Describes and starts these servers, each with a model of its own."""

    def __init__(self, model: Path, workers: int, folder: Path) -> None:
        """Prepare for a model of a repository; what the servers need is written into an empty folder."""
        super().__init__(workers, folder)
        self._model = model
        self._package = folder / PACKAGE
        self._package.mkdir()
        labels = from_triton_config(read_config_file(model / "config.pbtxt"), "1").labels
        (self._package / "class_names.txt").write_text("\n".join(labels), encoding="utf-8")

    def contestant(self, name: str, model: str) -> Contestant:
        """Describe one of `SAME_ENGINE` or `AT_ITS_BEST`; raise ContestantError or CommandError if it cannot take part."""
        (port,) = find_free(1)
        kind, _, variant = name.partition("_")
        is_default = variant == "default"
        probe, processes = "/docs", 1 if is_default or kind == "roboflow" else self.workers
        environment = {
            "BENCH_MODEL": str(self._model / "1" / "model.onnx"),
            "BENCH_LABELS": str(self._package / "class_names.txt"),
            "BENCH_ENGINE": variant,
            "BENCH_THREADS": "0" if is_default else "1",
            "TMPDIR": str(self._logs),  # LitServe leaves files there
        }
        match kind:
            case "nereid":
                command, probe = [sys.executable, "-m", "app", "serve"], "/readyz"
                environment = self._nereid(name, port) | {**(_SAME if variant else {})}
            case "roboflow":
                command, probe = [*self._roboflow(), str(port), str(self._package.parent)], "/readiness"
                environment = {**_OFFLINE, "MODEL_CACHE_DIR": str(self._package.parent)}
            case "litserve":
                command, probe = [str(PEERS.python()), "-m", "bench.contestants.lit", str(port), str(processes)], "/health"
            case _:
                options = [f"--port={port}", f"--workers={processes}", "--no-access-log"]
                command = [str(PEERS.python()), "-m", "uvicorn", "bench.contestants.plain:app", *options]
        return Contestant(
            name=name, command=command, environment=environment, port=port, probe=probe, model=model, workers=processes
        )

    def _nereid(self, name: str, port: int) -> dict[str, str]:
        """Return the settings of `serve` with nothing but the model."""
        home, repository = self._logs / name, self._logs / f"{name}_models"
        home.mkdir()
        link_installation(home)
        link_model(self._model, repository)
        return variables(Settings(port=port, model=self._model.name, model_repository=str(repository), triton_home=str(home)))

    def _roboflow(self) -> list[str]:
        """Write the package of its model, and return the program."""
        command = [str(ROBOFLOW.python()), "-m", "bench.contestants.roboflow_inference"]
        entry = registry.load().get(self._model.name)
        if entry is None:
            raise ContestantError(f"the network of {self._model.name} is not published")
        with TemporaryDirectory(dir=self._logs) as scratch:
            download(entry, Path(scratch)).rename(self._package / "weights.onnx")
        for name, content in _PACKAGE_FILES.items():
            (self._package / name).write_bytes(msgspec.json.encode(content))
        return command


@contextmanager
def peers_with(model: Path, workers: int) -> Iterator[Peers]:
    """Yield the peers of a model of a repository."""
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        try:
            yield Peers(model, workers, Path(folder))
        finally:
            for home in Path(folder).iterdir():
                with suppress(OSError):
                    Settings(triton_home=str(home)).triton_folder.rmdir()  # nobody will look for this home's Triton again


@contextmanager
def peers_of(models: Collection[str], workers: int, before: Path | None = None) -> Iterator[Peers]:  # noqa: ARG001 - as `lineup_of`
    """Yield the peers of one pulled or added model; raise ContestantError if there is none of this name."""
    (name,) = models
    if (model := pulled(name)) is None:
        raise ContestantError(f"{name} has not been pulled; run: ./just pull {name}")
    with peers_with(model, workers) as peers:
        yield peers
