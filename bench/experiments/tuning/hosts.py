"""Hosts of the tuned model: an embedded Triton per variant, or a running Triton that reloads the model."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import msgspec

from app.host.program import CommandError
from app.settings.schema import Settings
from app.triton.config_file import read_config_file
from app.triton.repository import config_path, loadable_models
from bench.experiments.tuning import config_text
from bench.experiments.tuning.variant import Variant, write_variant
from bench.harness.errors import ContestantError
from bench.harness.model_control import ModelControl
from bench.harness.triton import embedded_triton
from bench.models.repository import write_model


class Host(Protocol):
    """Runs variants of a model."""

    config: dict[str, Any]
    """The model's current config as Triton's JSON."""
    has_threads: bool
    """Whether the config sets the number of threads per instance."""

    def run(self, variant: Variant) -> Settings:
        """Run a variant; return the settings for its Triton.

        Raises:
            ContestantError: The variant cannot be run.
        """


class EmbeddedHost:
    """Starts a Triton for each variant, with a copy of the model's config. The user's config is not changed."""

    def __init__(self, repository: Path, model: str, folder: Path, stack: ExitStack) -> None:
        """Read the config.

        Args:
            repository: The model repository.
            model: Name of the model.
            folder: Folder for the copies.
            stack: Ends the last Triton.

        Raises:
            ContestantError: The model does not exist.
            ConfigFileError: Its config cannot be read.
        """
        if model not in loadable_models(repository):
            raise ContestantError(f"{model} is not in {repository}; ./just pull gets the models that it knows")
        self._source = repository / model
        self._file = config_path(self._source, is_embedded=True)
        self.config = read_config_file(self._file)
        self.has_threads = self.config.get("backend") == "onnxruntime"
        self._folder = folder
        self._triton = stack.enter_context(ExitStack())

    def run(self, variant: Variant) -> Settings:
        """Stop the previous variant's Triton, and start one for this variant."""
        self._triton.close()
        repository = Path(self._triton.enter_context(TemporaryDirectory(dir=self._folder)))
        write_model(self._source, repository, {self._file: config_text.edit(self._file, variant)})
        try:
            return self._triton.enter_context(embedded_triton(repository, self._source.name)).settings
        except CommandError as error:
            raise ContestantError(str(error)) from error


class RunningHost:
    """Makes a running Triton load the model with the config of each variant."""

    def __init__(self, settings: Settings, control: ModelControl, config: dict[str, Any]) -> None:
        """Use the Triton in the settings, which has loaded the model with this config."""
        self._settings = settings
        self._control = control
        self.config = config
        self.has_threads = False  # other backends use all cores by default

    def run(self, variant: Variant) -> Settings:
        """Reload the model."""
        self._control.load(write_variant(self.config, variant))
        return self._settings


@contextmanager
def host_of(settings: Settings, model: str) -> Iterator[Host]:
    """Return a host for a model, on the kind of Triton in the settings, until the block ends.

    Raises:
        ContestantError: The model does not exist, or Triton does not respond.
    """
    if "," in settings.triton_endpoints:
        raise ContestantError("name one Triton in NEREID_TRITON_ENDPOINTS: each is tuned by itself")
    settings = msgspec.structs.replace(settings, model=model)
    with ExitStack() as stack:
        if settings.triton_endpoints:
            control = ModelControl(settings, model)
            yield RunningHost(settings, control, stack.enter_context(control.restored()))
        else:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nereid-bench-")))
            yield EmbeddedHost(Path(settings.model_repository).resolve(), model, folder, stack)
