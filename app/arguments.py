"""The arguments of each command of `nereid`."""

import argparse
from pathlib import Path
from typing import Any, get_type_hints

from app.settings.schema import PREFIX
from app.zoo.recognize import Evaluation, Options

_KEY_HELP = (
    "Create an API key. Its credential, id.secret, is printed to stdout and stored nowhere: give it to the client. Its table for "
    f"the file {PREFIX}API_KEYS_FILE is printed to stderr: add it there. So `nereid key camera-1 > secret` shows only the table. "
    "To replace the secret of a key in use, add only the new sha256 to the list in its table, and remove the old one once the "
    "client has the new credential."
)

_DOCTOR_HELP = (
    "Check this machine, the settings, a running Triton, which gets a few blank images, and the default model, and say what to do "
    "about what is wrong. Exit code: 0, or 1 if something does not work."
)


def declare(command: argparse.ArgumentParser, name: str) -> None:
    """Declare the arguments of the command with this name."""
    _declare_model(command, name)
    if name == "serve":
        command.add_argument("--instances", help="number of instances on unix sockets, for a proxy in front of them")
    if name in {"serve", "api"}:
        command.add_argument("--port", help="port of the API")
        command.add_argument("--workers", help="number of API processes")
    if name in {"serve", "api", "triton", "doctor"}:
        command.add_argument("--model", help="the default model")
    if name in {"serve", "api", "doctor"}:
        command.add_argument("--triton", help="gRPC endpoint of a running Triton: host:port or unix:/path")
    if name == "detect":
        command.add_argument("arguments", nargs="*", help="those of `nereid-client detect`; --help lists them")
    if name == "doctor":
        command.description = _DOCTOR_HELP
        command.add_argument("--json", action="store_true", help="print one JSON document")
        command.add_argument("--strict", action="store_true", help="exit with 1 after a warning, too")
    if name == "compare":
        command.add_argument("name", help="name of the route")
        command.add_argument("--key-file", type=Path, help="file with an API key that has the scope health, if keys are needed")
    if name == "cache":
        command.add_argument("action", choices=["clear"], help="what to do")
    if name == "key":
        command.description = _KEY_HELP
        command.usage = "nereid key NAME, such as: nereid key camera-1"
        command.add_argument("id", metavar="NAME", help="name of the key in the file and in the log")


def _declare_model(command: argparse.ArgumentParser, name: str) -> None:
    """Declare the arguments of the commands that change the model repository."""
    if name == "pull":
        command.add_argument("name", nargs="?", help="name of the model; the default model if omitted")
        command.add_argument("--from", dest="source", type=Path, help="local file, or folder with the published files")
        command.add_argument("--sha256", help="SHA-256 of the file, if it is not the published one")
    if name in {"load", "unload"}:
        command.add_argument("name", help="name of the model")
    if name in {"use", "remove"}:
        command.add_argument("reference", help="name of the model, or name:version")
    if name in {"pull", "add"}:  # what a file may not say of itself
        for option, hint in get_type_hints(Options if name == "add" else Evaluation, include_extras=True).items():
            kind: dict[str, Any] = {"action": "store_true", "default": None} if option == "multi_label" else {}
            command.add_argument(f"--{option.replace('_', '-')}", help=hint.__metadata__[0].description, **kind)
    if name != "add":
        return
    command.add_argument("source", help="ONNX file, folder with one, https address, or - for the standard input")
    command.add_argument("--name", help="name of the model; by default that of the file")
    command.add_argument("--licence", default="", help="shown by /models")
    command.add_argument("--samples", type=Path, help="folder of images on which the model is checked")
    command.add_argument("--out", type=Path, help="model repository to write to, instead of the one in the settings")
    command.add_argument("--untrusted", action="store_true", help="check the file apart, as one that may be hostile")
