"""The units for systemd: their options, and the command line of a Triton."""

import re
import shlex

from tests.deploy.needs import DEPLOY

UNITS = ["nereid.service", "tritonserver@.service", "nereid-compose.service"]
MODELS = "tritonserver-models.conf"
"""A drop-in for `tritonserver@.service`."""


def read(unit: str) -> dict[str, list[str]]:
    text = (DEPLOY / "systemd" / unit).read_text(encoding="utf-8").replace("\\\n", " ")
    options: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        options.setdefault(name, []).append(value)
    return options


NEREID, TRITON, COMPOSE = map(read, UNITS)


def environment(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(text, comments=True))


def triton_command(gpu: int, **changes: str) -> list[str]:
    """Return the command line of `tritonserver@GPU`, with changes to its environment as a drop-in makes them."""
    variables = {**environment(" ".join(TRITON["Environment"])), **changes}
    command = shlex.split(TRITON["ExecStart"][0].replace("%i", str(gpu)))
    return [re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word) for word in command]


def options_of(command: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
