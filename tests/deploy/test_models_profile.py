"""The files that let models be added while Triton runs; tests/system/test_shared_repository.py runs Tritons with their options."""

import re
from typing import NamedTuple

import pytest

from tests.deploy import units
from tests.deploy.needs import DEPLOY, GPU, SERVICES
from tests.deploy.units import options_of

_NAME = "compose.models.yaml"
_SERVICES, _DROP_IN = SERVICES[_NAME], units.read(units.MODELS)


class Profile(NamedTuple):
    """Options of a Triton that loads models, and the settings of the gateway beside it."""

    options: dict[str, str]
    settings: dict[str, str]
    umask: str
    """When Triton makes its socket."""
    mode: int
    """Of the folder of its socket."""


PROFILES = {
    "compose": Profile(options_of(_SERVICES["triton"]["command"]), _SERVICES["api-1"]["environment"], "022", 0o1777),
    "systemd": Profile(
        options_of(_DROP_IN["ExecStart"][-1].replace("%i", "0").split()),
        dict(re.findall(r"^#   (NEREID_\w+)=(.*)$", (DEPLOY / "systemd" / units.MODELS).read_text(encoding="utf-8"), re.MULTILINE)),
        "077",
        int(_DROP_IN["RuntimeDirectoryMode"][0], 8),
    ),
}


def test_models_cannot_be_loaded_by_default() -> None:
    """A model can run code."""
    texts = {path: path.read_text(encoding="utf-8") for path in DEPLOY.rglob("*") if path.suffix in {".yaml", ".service", ".conf"}}

    assert {path.name for path, text in texts.items() if "--model-control-mode" in text} == {_NAME, units.MODELS}


@pytest.mark.parametrize("name", PROFILES)
def test_triton_keeps_its_other_options_and_the_gateway_has_its_address(name: str) -> None:
    """A list of arguments replaces that of the other file. Triton adds its port to a socket's path, too."""
    profile = PROFILES[name]
    before = options_of(GPU["triton"]["command"] if name == "compose" else units.triton_command(0))

    assert before.keys() - {"http-address", "http-port", "grpc-port"} <= profile.options.keys()
    assert profile.settings["NEREID_TRITON_ENDPOINTS"] == f"{profile.options['grpc-address']}:8001"
