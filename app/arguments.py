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

# The commands that take an argument, its name, and what argparse has to know of it.
_ARGUMENTS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("serve", "--instances", {"help": "number of instances on unix sockets, for a proxy in front of them"}),
    (
        "serve triton",
        "--gpu",
        {"action": "store_const", "const": "on", "help": "run the models of the embedded Triton on this machine's GPU"},
    ),
    ("serve", "--search", {"action": "store_const", "const": "on", "help": "also search in images, on PostgreSQL"}),
    ("serve search api", "--port", {"help": "port of the API"}),
    ("serve search api", "--workers", {"help": "number of API processes"}),
    ("serve search api triton doctor", "--model", {"help": "the default model"}),
    ("serve search api doctor", "--triton", {"help": "gRPC endpoint of a running Triton: host:port or unix:/path"}),
    ("detect", "arguments", {"nargs": "*", "help": "those of `nereid-client detect`; --help lists them"}),
    ("pull", "name", {"nargs": "?", "help": "name of the model, or of a set of models; the default model if omitted"}),
    ("pull", "--from", {"dest": "source", "type": Path, "help": "local file, or folder with the published files"}),
    ("pull add", "--sha256", {"help": "SHA-256 that the file must have; `pull` knows those of the published files"}),
    (
        "add",
        "source",
        {"help": "ONNX file, folder with one, https address, or - for the standard input; or the TOML file of a cascade"},
    ),
    ("add", "--name", {"help": "name of the model; by default that of the file"}),
    ("add", "--licence", {"default": "", "help": "shown by /models"}),
    ("add", "--samples", {"type": Path, "help": "folder of images on which the model is checked"}),
    ("add", "--accept", {"action": "store_true", "help": "add a detector although it finds nothing in the samples"}),
    ("add", "--out", {"type": Path, "help": "model repository to write to, instead of the one in the settings"}),
    (
        "pull add",
        "--production",
        {
            "action": "store_true",
            "help": "also make the model in FP16, for a GPU; done anyway for a Triton elsewhere, and for --gpu",
        },
    ),
    ("add", "--untrusted", {"action": "store_true", "help": "check the file apart, as one that may be hostile"}),
    ("use remove", "reference", {"help": "name of the model, or name:version"}),
    ("load unload", "name", {"help": "name of the model"}),
    ("compare", "name", {"help": "name of the route"}),
    ("compare", "--key-file", {"type": Path, "help": "file with an API key that has the scope health, if keys are needed"}),
    ("key", "id", {"metavar": "NAME", "help": "name of the key in the file and in the log"}),
    ("database", "action", {"choices": ["backup", "restore"], "help": "what to do"}),
    ("database", "file", {"type": Path, "help": "file of the backup"}),
    ("doctor", "--json", {"action": "store_true", "help": "print one JSON document"}),
    ("doctor", "--strict", {"action": "store_true", "help": "exit with 1 after a warning, too"}),
)


def declare(command: argparse.ArgumentParser, name: str) -> None:
    """Declare the arguments of the command with this name."""
    command.description = {"doctor": _DOCTOR_HELP, "key": _KEY_HELP}.get(name, command.description)
    if name == "key":
        command.usage = "nereid key NAME, such as: nereid key camera-1"
    if name == "search":
        command.set_defaults(search="alone")
    for commands, argument, options in _ARGUMENTS:
        if name in commands.split():
            command.add_argument(argument, **options)
    if name in {"pull", "add"}:  # what a file may not say of itself
        for option, hint in get_type_hints(Options if name == "add" else Evaluation, include_extras=True).items():
            kind: dict[str, Any] = {"action": "store_true", "default": None} if option == "multi_label" else {}
            command.add_argument(f"--{option.replace('_', '-')}", help=hint.__metadata__[0].description, **kind)
