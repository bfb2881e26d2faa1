"""The files that let models be added while Triton runs; tests/system/test_shared_repository.py runs Tritons with their options."""

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.deploy.needs import DEPLOY, IMAGE, load
from tests.deploy.test_systemd import analyze

MODELS, OVERLAY = DEPLOY / "systemd" / "tritonserver-models.conf", DEPLOY / "compose.models.yaml"


class Profile(NamedTuple):
    """Options of a Triton that loads models, and the settings of the gateway beside it."""

    options: dict[str, str]
    settings: dict[str, str]
    umask: str
    """When Triton makes its socket."""
    mode: int
    """Of the folder of its socket."""


def options_of(command: list[str]) -> dict[str, str]:
    return dict(option.removeprefix("--").split("=", 1) for option in command if "=" in option)


def profiles() -> dict[str, Profile]:
    services = load(OVERLAY)["services"]
    unit = MODELS.read_text(encoding="utf-8").replace("\\\n", "").replace("%i", "0")
    command, mode = (re.findall(rf"^{name}=(.+)$", unit, re.MULTILINE)[0] for name in ("ExecStart", "RuntimeDirectoryMode"))
    settings = dict(re.findall(r"^#   (NEREID_\w+)=(.*)$", unit, re.MULTILINE))
    return {
        "compose": Profile(options_of(services["triton"]["command"]), services["api-1"]["environment"], "022", 0o1777),
        "systemd": Profile(options_of(command.split()), settings, "077", int(mode, 8)),
    }


PROFILES = profiles()
SERVICES, OWN_SERVICES = load(DEPLOY / "compose.yaml")["services"], load(OVERLAY)["services"]
(UNIT,) = (DEPLOY / "systemd").glob("tritonserver*.service")


def test_nobody_loads_models_by_default() -> None:
    """A model can run code."""
    texts = {path: path.read_text(encoding="utf-8") for path in DEPLOY.rglob("*") if path.suffix in {".yaml", ".service", ".conf"}}

    assert {path for path, text in texts.items() if "--model-control-mode" in text} == {OVERLAY, MODELS}


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_the_gateway_has_the_address_of_triton(profile: Profile) -> None:
    """Triton adds its port to a socket's path, too."""
    assert profile.settings["NEREID_TRITON_ENDPOINTS"] == f"{profile.options['grpc-address']}:8001"


def test_triton_keeps_its_other_options() -> None:
    """A list of arguments replaces that of the other file."""
    (command,) = re.findall(r"^ExecStart=(.+)$", UNIT.read_text(encoding="utf-8").replace("\\\n", ""), re.MULTILINE)
    without = {"http-address", "http-port", "grpc-port"}

    assert options_of(SERVICES["triton"]["command"]).items() <= PROFILES["compose"].options.items()
    assert options_of(command.split()).keys() - without <= PROFILES["systemd"].options.keys()


def test_the_overlay_is_valid() -> None:
    """It changes services that exist, and adds one with the image of this version, which can do as little as they."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.models.yaml"]
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, check=False)
    ((_, own),) = [(name, service) for name, service in OWN_SERVICES.items() if name not in SERVICES]

    assert done.returncode == 0, done.stdout
    assert own["image"] == f"{IMAGE}-embedded"
    assert own["user"] == SERVICES["triton"]["user"]
    for name in ("read_only", "cap_drop", "security_opt", "logging"):
        assert own[name] == SERVICES["triton"][name]


def test_the_drop_in_is_valid(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n", encoding="ascii")
    program.chmod(0o755)
    unit, drop_in = tmp_path / "tritonserver@.service", tmp_path / "tritonserver@.service.d" / "models.conf"
    drop_in.parent.mkdir()
    for source, target in ((UNIT, unit), (MODELS, drop_in)):
        text = source.read_text(encoding="utf-8")
        target.write_text(re.sub(r"(?<=^ExecStart=)/\S+", str(program), text, flags=re.MULTILINE), encoding="utf-8")

    assert analyze("verify", "--man=no", unit) == ""
