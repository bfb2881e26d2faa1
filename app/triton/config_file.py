"""Read the config files of a model repository."""

from collections.abc import Container
from pathlib import Path
from typing import Any, Literal, NamedTuple

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2

from app.triton.repository import config_path, model_folders


class ConfigFileError(Exception):
    """A model's config cannot be read; the message is one line."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return a config in Triton's JSON form, without fields that this gateway does not know; raises ConfigFileError."""
    try:
        text = path.read_text(encoding="utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return dict(MessageToDict(config, preserving_proto_field_name=True))


class Unloadable(NamedTuple):
    """Why a Triton cannot load a model."""

    state: Literal["no_config", "invalid"]
    reason: str
    """One line that says what to do."""


def unloadable_models(repository: Path, loaded: Container[str] = (), *, is_embedded: bool) -> dict[str, Unloadable]:
    """Return the models, except the loaded ones, with a config that cannot be read, and the networks without one.

    There are none if this user cannot read the repository, of which a gateway with a Triton elsewhere needs nothing.
    """
    found: dict[str, Unloadable] = {}
    try:
        folders = model_folders(repository)
    except OSError:
        return found
    for folder in folders:
        if folder.name in loaded:
            continue
        config = config_path(folder, is_embedded=is_embedded)
        try:
            if config.is_file():
                read_config_file(config)
            elif any(folder.rglob("*.onnx")):
                add = f"`nereid add {folder}`" if any(folder.glob("*.onnx")) else "outside of the repository, `nereid add`"
                reason = f"{folder} has no config.pbtxt; {add} makes a model of the network in it"
                found[folder.name] = Unloadable("no_config", reason)
        except ConfigFileError as error:
            found[folder.name] = Unloadable("invalid", str(error))
        except OSError as error:
            found[folder.name] = Unloadable("invalid", f"{folder} cannot be read: {error.strerror}")
    return found
