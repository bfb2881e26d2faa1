"""Pull a model: download the published network, compose the model and store it in the model repository."""

import tempfile
from contextlib import suppress
from pathlib import Path

from app.host.program import CommandError, first_line
from app.telemetry.logging import say
from app.zoo import registry
from app.zoo.download import download
from app.zoo.registry import PublishedModel


def pull(name: str, entry: PublishedModel, repository: Path, *, source: Path | None = None, sha256: str | None = None) -> Path:
    """Pull a model into Triton's model repository, and return the path of its file. Source and SHA-256 are as for `download`.

    Raises:
        CommandError: The network cannot be composed, or the model cannot be written; or as for `download`.
    """
    say(f"{name}: {entry.title}")
    say(f"licence: {entry.licence}")
    say(f"source: {source or entry.source}")
    target = repository / name / "1" / "model.onnx"
    try:
        target.parents[1].mkdir(parents=True, exist_ok=True)
        # On the same disk, so that the last step is a rename; with a name that is not a version.
        with tempfile.TemporaryDirectory(dir=target.parents[1], prefix=".pull-") as folder:
            network = download(entry, Path(folder), source=source, sha256=sha256)
            model = _compose(network, entry, Path(folder, "composed.onnx"))
            registry.lay_out_configs(name, target.parents[1], Path(folder))
            target.parent.mkdir(exist_ok=True)
            model.rename(target)
    except OSError as error:
        raise CommandError(f"{name} could not be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            target.parents[1].rmdir()  # if it is empty
    say(f"{name} is in {target}")
    return target


def _compose(network: Path, entry: PublishedModel, target: Path) -> Path:
    try:
        import onnx  # noqa: PLC0415 - heavy, and not installed if only the API runs

        from app.zoo.compose import compose_model, load_network  # noqa: PLC0415
    except ImportError as error:
        raise CommandError("onnx is not installed; use ./just pull, or run: pip install '.[models]'") from error
    try:
        onnx.save(compose_model(load_network(network, entry.recipe), entry.recipe), target)
    except Exception as error:  # onnx has its own exception for every kind of broken file
        raise CommandError(f"{network.name} cannot be composed: {first_line(error)}") from error
    return target
