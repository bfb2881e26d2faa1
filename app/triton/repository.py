"""A model repository: what Triton says of the models in it, and a model's config as it is written there."""

from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2, service_pb2

from app.triton.client import TritonClient


class ConfigFileError(Exception):
    """A model's config cannot be read; the message is one line."""


class ModelState(NamedTuple):
    """One model in Triton's repository."""

    state: str
    """READY, UNAVAILABLE, LOADING ..., or empty if Triton has refused to load it without a reason that it keeps."""
    reason: str
    """Why it is not ready, one line; empty if it is, or if only Triton's log tells."""


async def read_states(client: TritonClient) -> dict[str, ModelState]:
    """List the models in Triton's repository; a model is ready if one of its versions is.

    Raises:
        TritonUnavailable: Triton does not answer.
        GatewayError: Triton does not tell.
    """
    index = await client.ask("RepositoryIndex", service_pb2.RepositoryIndexRequest())
    states: dict[str, ModelState] = {}
    for version in index.models:
        if version.name not in states or version.state == "READY":
            states[version.name] = ModelState(version.state, " ".join(version.reason.partition("\n")[0].split()))
    return states


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a config, as Triton's JSON has it. Fields that are newer than this gateway are left out.

    Raises:
        ConfigFileError: It cannot be read, or is not valid.
    """
    try:
        text = path.read_text(encoding="utf-8")
        config = text_format.Parse(text, model_config_pb2.ModelConfig(), allow_unknown_field=True)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    return dict(MessageToDict(config, preserving_proto_field_name=True))
