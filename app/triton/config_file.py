"""Read the config files of a model repository."""

from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2


class ConfigFileError(Exception):
    """A model's config cannot be read; the message is one line."""


def read_config_file(path: Path) -> dict[str, Any]:
    """Return a config in Triton's JSON form, without fields that this gateway does not know.

    Raises:
        ConfigFileError: The file cannot be read, or is not valid.
    """
    try:
        text = path.read_text(encoding="utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return dict(MessageToDict(config, preserving_proto_field_name=True))
