"""The options of Triton in the shipped files, and those that let models be added while it runs.

tests/system/test_shared_repository.py runs Tritons with the latter.
"""

import re
import subprocess
from typing import NamedTuple

import pytest

from app.embedded.install import install, libpython_folder
from tests.deploy.needs import DEPLOY, GPU, MODELS, SERVICES, options_of, read_unit, triton_command
from tests.support import ROOT

FILES = [ROOT / "compose.nvidia.yaml", DEPLOY / "systemd/tritonserver@.service", *DEPLOY.glob("kubernetes/*/triton.yaml")]
NEWER = {"allow-client-shm"}
"""Known to 2.69 and later."""
_NAME = "compose.models.yaml"
_SERVICES, _DROP_IN = SERVICES[_NAME], read_unit(MODELS)


class Profile(NamedTuple):
    """Options of a Triton that loads models, and the settings of the gateway beside it."""

    options: dict[str, str]
    settings: dict[str, str]
    umask: str
    """When Triton makes its socket."""
    mode: int
    """Of the folder of its socket."""


PROFILES = {
    "compose": Profile(options_of(_SERVICES["triton"]["command"]), _SERVICES["api-1"]["environment"], "022", 0o700),
    "systemd": Profile(
        options_of(_DROP_IN["ExecStart"][-1].replace("%i", "0").split()),
        dict(re.findall(r"^#   (NEREID_\w+)=(.*)$", (DEPLOY / "systemd" / MODELS).read_text(encoding="utf-8"), re.MULTILINE)),
        "077",
        int(_DROP_IN["RuntimeDirectoryMode"][0], 8),
    ),
}


def test_models_cannot_be_loaded_by_default() -> None:
    """A model can run code."""
    texts = {path: path.read_text(encoding="utf-8") for path in DEPLOY.rglob("*") if path.suffix in {".yaml", ".service", ".conf"}}

    assert {path.name for path, text in texts.items() if "--model-control-mode" in text} == {_NAME, MODELS}


@pytest.mark.parametrize("name", PROFILES)
def test_triton_keeps_its_other_options_and_the_gateway_has_its_address(name: str) -> None:
    """A list of arguments replaces that of the other file. Triton adds its port to a socket's path, too."""
    profile = PROFILES[name]
    before = options_of(GPU["triton"]["command"] if name == "compose" else triton_command(0))

    assert before.keys() - {"http-address", "http-port", "grpc-port"} <= profile.options.keys()
    assert profile.settings["NEREID_TRITON_ENDPOINTS"] == f"{profile.options['grpc-address']}:8001"


@pytest.mark.system
def test_triton_knows_its_options() -> None:
    """It would not start with one that it does not know."""
    home = ROOT / ".triton"
    install(home)
    libraries = {"LD_LIBRARY_PATH": f"{home / 'server' / 'nvidia_pytriton.libs'}:{libpython_folder() or ''}"}
    program = home / "server" / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    shown = subprocess.run([program, "--help"], env=libraries, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    known = set(re.findall(r"^\s*--([a-z0-9-]+)", shown.stdout.decode(), re.MULTILINE))

    for file in FILES:
        lines = [line.partition("#")[0] for line in file.read_text(encoding="utf-8").splitlines()]
        options = set(re.findall(r"(?<=[\s-]--)[a-z-]+(?==)", "\n".join(lines)))
        assert {"model-repository", "exit-on-error", "http-address", "metrics-address"} <= options <= known | NEWER, file
