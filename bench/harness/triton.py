"""A separate embedded Triton for a measurement, with its own socket, log and models."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import psutil

from app import feature
from app.embedded.folder import Device
from app.embedded.install import CPU_FOLDER, GPU_FOLDER, install
from app.embedded.server import EmbeddedTriton
from app.settings.schema import PREFIX, Settings
from app.triton.repository import loadable_models
from bench.harness.errors import ContestantError
from bench.harness.meters import children
from bench.models.repository import link_model, write_variants


class Triton(NamedTuple):
    """A running embedded Triton."""

    settings: Settings
    process: psutil.Process
    server: EmbeddedTriton
    """Owns the process and its folder."""

    @property
    def repository(self) -> Path:
        """Its model repository."""
        return Path(self.settings.model_repository)

    @property
    def address(self) -> str:
        """Its gRPC endpoint."""
        return self.settings.triton_address

    @property
    def processes(self) -> dict[str, list[psutil.Process]]:
        """Its processes by kind: `triton`, and `stubs`, which run the models."""
        return {"triton": [self.process], "stubs": children(self.process)}


def link_installation(home: Path, *, for_gpu: bool = False) -> None:
    """Make a folder the home of an embedded Triton, with links to the usual installation, but a separate log and socket."""
    installed = Path(feature.read_settings().triton_home).resolve()
    install(installed, for_gpu=for_gpu)
    for part in ("server", GPU_FOLDER if for_gpu else CPU_FOLDER):
        (home / part).symlink_to(installed / part)


@contextmanager
def embedded_triton(repository: Path, model: str, ports: int = 0, gpu: str = "") -> Iterator[Triton]:
    """Run an embedded Triton until the block ends; raise CommandError if it cannot be installed, or does not start.

    Args:
        repository: Its model repository.
        model: The model that must be ready.
        ports: The first of its TCP ports; 0 for none.
        gpu: The name of the GPU on which it runs models; empty for the CPU.
    """
    with TemporaryDirectory(prefix="nereid-bench-") as home:
        link_installation(Path(home), for_gpu=bool(gpu))
        settings = msgspec.structs.replace(
            feature.read_settings(),
            model=model,
            model_repository=str(repository),
            triton_endpoints="",
            triton_control_key_file="",
            triton_home=home,
            triton_ports=ports,
        )
        server = EmbeddedTriton(settings)
        server.device = Device(gpu)
        try:
            server.start()
            yield Triton(settings, psutil.Process(server.pid), server)
        finally:
            server.stop()
            with suppress(OSError):
                settings.triton_folder.rmdir()  # nobody will look for this home's Triton again


def pulled(name: str) -> Path | None:
    """Return the folder of a model in the model repository of the settings; None if it has not been pulled."""
    repository = Path(feature.read_settings().model_repository)
    try:
        return repository / name if name in loadable_models(repository) else None
    except OSError as error:
        raise ContestantError(f"{PREFIX}MODEL_REPOSITORY: {error.filename or repository}: {error.strerror}") from error


@contextmanager
def fixture_triton(names: Collection[str], gpu: str = "") -> Iterator[Triton]:
    """Run an embedded Triton with fixtures of `bench.models`, pulled models, and their variants for FP32 input and for files.

    It runs them on a GPU with this name, or on the CPU.

    Raises:
        ContestantError: A model has not been pulled, or the model repository cannot be read.
    """
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        for name in names:
            if not write_variants(name, Path(folder)):
                if (model := pulled(name)) is None:
                    raise ContestantError(f"{name} has not been pulled; run: ./just pull {name}")
                link_model(model, Path(folder))
        with embedded_triton(Path(folder), next(iter(names)), gpu=gpu) as triton:
            yield triton
