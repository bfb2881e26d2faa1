"""The files that let models be added while Triton runs; tests/system/test_shared_repository.py runs Tritons with their options."""

import re
from typing import NamedTuple

import pytest

from tests.deploy import compose, units
from tests.deploy.needs import DEPLOY, IMAGE
from tests.deploy.units import options_of

OVERLAY = "compose.models.yaml"
WITHOUT, SERVICES = (compose.read(*files)["services"] for files in (["compose.yaml"], ["compose.yaml", OVERLAY]))


class Profile(NamedTuple):
    """Options of a Triton that loads models, and the settings of the gateway beside it."""

    options: dict[str, str]
    settings: dict[str, str]
    umask: str
    """When Triton makes its socket."""
    mode: int
    """Of the folder of its socket."""


def profiles() -> dict[str, Profile]:
    drop_in = units.read(units.MODELS)
    command, mode = drop_in["ExecStart"][-1].replace("%i", "0").split(), int(drop_in["RuntimeDirectoryMode"][0], 8)
    text = (DEPLOY / "systemd" / units.MODELS).read_text(encoding="utf-8")
    settings = dict(re.findall(r"^#   (NEREID_\w+)=(.*)$", text, re.MULTILINE))
    return {
        "compose": Profile(options_of(SERVICES["triton"]["command"]), SERVICES["api-1"]["environment"], "022", 0o1777),
        "systemd": Profile(options_of(command), settings, "077", mode),
    }


PROFILES = profiles()


def test_models_cannot_be_loaded_by_default() -> None:
    """A model can run code."""
    texts = {path: path.read_text(encoding="utf-8") for path in DEPLOY.rglob("*") if path.suffix in {".yaml", ".service", ".conf"}}

    assert {path.name for path, text in texts.items() if "--model-control-mode" in text} == {OVERLAY, units.MODELS}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_gateway_has_the_address_of_triton(profile: Profile) -> None:
    """Triton adds its port to a socket's path, too."""
    assert profile.settings["NEREID_TRITON_ENDPOINTS"] == f"{profile.options['grpc-address']}:8001"


def test_triton_keeps_its_other_options() -> None:
    """A list of arguments replaces that of the other file."""
    without = {"http-address", "http-port", "grpc-port"}

    assert options_of(WITHOUT["triton"]["command"]).items() <= PROFILES["compose"].options.items()
    assert units.triton_options(0).keys() - without <= PROFILES["systemd"].options.keys()


def test_the_overlay_adds_one_service() -> None:
    (added,) = (service for name, service in SERVICES.items() if name not in WITHOUT)

    assert added["image"] == f"{IMAGE}-embedded"
    assert added["user"] == SERVICES["triton"]["user"]
