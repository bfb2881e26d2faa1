"""The options that the shipped files give to Triton, as a real one knows them."""

import re
import subprocess

import pytest

from app.embedded.install import install, libpython_folder
from tests.deploy.needs import DEPLOY
from tests.support import ROOT

FILES = ["compose.yaml", "systemd/tritonserver@.service", "kubernetes/sidecar/triton.yaml", "kubernetes/separate/triton.yaml"]
NEWER = {"allow-client-shm"}
"""Known to 2.69 and later."""


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
        lines = [line.partition("#")[0] for line in (DEPLOY / file).read_text(encoding="utf-8").splitlines()]
        options = set(re.findall(r"(?<=[\s-]--)[a-z-]+(?==)", "\n".join(lines)))
        assert {"model-repository", "exit-on-error", "http-address", "metrics-address"} <= options <= known | NEWER, file
