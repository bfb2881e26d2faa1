"""What the embedded Triton needs before it starts: its installation, and the default model, on a GPU in FP16."""

import subprocess
from contextlib import suppress
from pathlib import Path

from app.embedded.install import install
from app.host import program
from app.host.program import CommandError
from app.settings.schema import PREFIX, Settings, SettingsError
from app.telemetry.logging import say
from app.triton.repository import loadable_models
from app.zoo import registry
from app.zoo.configs import runs_half
from app.zoo.repository import Repository


def prepare(settings: Settings, *, for_gpu: bool) -> None:
    """Install the embedded Triton, for a GPU if asked for, and pull the default model; raise SettingsError or CommandError."""
    repository = Path(settings.model_repository)
    try:
        is_pulled = settings.model in loadable_models(repository)
    except OSError as error:
        raise SettingsError(f"{PREFIX}MODEL_REPOSITORY: {error.filename or repository}: {error.strerror}") from error
    if not is_pulled:
        registry.select(registry.load(), settings.model)  # says what is wrong before the installation
    try:
        Repository(repository).write_configs()
    except CommandError as error:
        say(f"warning: {error}")
    install(Path(settings.triton_home), for_gpu=for_gpu)
    if not is_pulled:
        _pull_apart(settings, *(["--production"] if for_gpu else []))
    elif for_gpu:
        _make_half(settings)


def _make_half(settings: Settings) -> None:
    """Pull the default model again if it was pulled before there was a GPU, and say which models have no graph in FP16."""
    repository, published = Repository(Path(settings.model_repository)), registry.load()
    models = {name: model for name, model in repository.models().items() if not runs_half(repository.path / name, model)}
    default = models.get(settings.model)
    # A network of the user that has the name of a published model stays the default version.
    entry = published.get(settings.model)
    if default is not None and entry is not None and len(default.versions) == 1 and default.source == entry.source:
        with suppress(CommandError):  # whose reason is printed
            _pull_apart(settings, "--production")
    slow = [name for name, model in models.items() if not model.pixel_model and not runs_half(repository.path / name, model)]
    if slow:
        say(f"in FP32, which takes twice the time of FP16, run {', '.join(slow)}; add or pull them again with --production")


def _pull_apart(settings: Settings, *options: str) -> None:
    """Pull the default model in a process of its own, so that this one does not keep the memory of the libraries."""
    command = program.command("app", "pull", *options, "--", settings.model)
    if subprocess.run(command, env=program.environment(), check=False).returncode:  # noqa: S603
        raise CommandError(f"{settings.model} was not pulled")
