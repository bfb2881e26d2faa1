"""The options that the shipped files give to Triton, as a real one knows them."""

import re
import subprocess

import pytest

from app.embedded.install import install, libpython_folder
from tests.deploy.needs import DEPLOY
from tests.support import ROOT

pytestmark = pytest.mark.system

FILES = ["compose.yaml", "systemd/tritonserver@.service", "kubernetes/sidecar/triton.yaml", "kubernetes/separate/triton.yaml"]
NEWER = {"allow-client-shm"}
"""Known to 2.69 and later."""


@pytest.fixture(scope="module")
def known() -> set[str]:
    home = ROOT / ".triton"
    install(home)
    libraries = {"LD_LIBRARY_PATH": f"{home / 'server' / 'nvidia_pytriton.libs'}:{libpython_folder() or ''}"}
    program = home / "server" / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    shown = subprocess.run(
        [program, "--help"], env=libraries, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return set(re.findall(r"^\s*--([a-z0-9-]+)", shown.stdout, re.MULTILINE))


@pytest.mark.parametrize("file", FILES)
def test_triton_knows_its_options(file: str, known: set[str]) -> None:
    """It would not start with one that it does not know."""
    lines = [line.partition("#")[0] for line in (DEPLOY / file).read_text(encoding="utf-8").splitlines()]
    options = set(re.findall(r"(?<=[\s-]--)[a-z-]+(?==)", "\n".join(lines)))

    assert {"model-repository", "exit-on-error", "http-address", "metrics-address"} <= options
    assert options <= known | NEWER
