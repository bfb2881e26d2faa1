"""The wheel, installed in an environment without the checkout, and run in an empty folder as a user with an empty home."""

import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from app import __version__
from app.embedded.server import EmbeddedTriton
from bench.harness.processes import environment_of, running
from tests.support import ROOT, free_port, json, sample_image, triton_home

pytestmark = pytest.mark.packages

READY_SECONDS = 300
STOP_SECONDS = 60


class Installed(NamedTuple):
    """The installed command, and the user who runs it."""

    path: Path
    folder: Path
    """The current folder, empty."""
    home: Path

    @property
    def data(self) -> Path:
        return self.home / ".local" / "share" / "nereid"

    @property
    def environment(self) -> dict[str, str]:
        return {**environment_of(self.folder), "HOME": str(self.home), "XDG_DATA_HOME": ""}

    def run(self, *arguments: str | Path) -> str:
        command = [self.path, *arguments]
        done = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "app", source / "app", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", f"--wheel-dir={tmp_path}"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    (built,) = tmp_path.glob("*.whl")
    return built


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Installed:
    """Install it in an environment that has only the dependencies in common with this one."""
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python, (packages,) = environment / "bin" / "python", environment.glob("lib/python3*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
    options = ["--quiet", "--no-index", "--no-deps", "--ignore-installed"]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, "install", *options, wheel], check=True)
    for folder in ("folder", "home"):
        (tmp_path / folder).mkdir()
    return Installed(environment / "bin" / "nereid", tmp_path / "folder", tmp_path / "home")


def test_it_runs_without_the_checkout(
    wheel: Path, installed: Installed, networks: dict[str, Path], triton: EmbeddedTriton, tmp_path: Path
) -> None:
    """It pulls and serves a model; everything that it writes is in the user's data directory."""
    assert triton.poll() is None  # installed
    home = installed.data / ".triton"
    home.mkdir(parents=True)
    triton_home(home)

    assert wheel.name == f"nereid_gateway-{__version__}-py3-none-any.whl"
    assert installed.run("--version") == f"nereid {__version__}\n"
    assert installed.run("models") == ""
    installed.run("pull", "yolo11n", "--from", networks["yolo11n"])
    assert installed.run("models").startswith("yolo11n: 80 classes, 640 x 640, ")

    port, log = free_port(), tmp_path / "serve.log"
    environment = {**installed.environment, "NEREID_PORT": str(port), "NEREID_TIMEOUT_SECONDS": "30"}
    command = [str(installed.path), "serve"]
    with running(command, environment, port, "/readyz", log, installed.folder, ready_seconds=READY_SECONDS) as server:
        answer = json(httpx.post(f"{server.url}/detect", content=sample_image("chelsea.jpg"), timeout=60))
        page = httpx.get(f"{server.url}/page-assets/page.js")
        doctor = installed.run("doctor")
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_SECONDS) == 0

    assert [found["class_name"] for found in answer["detections"]] == ["cat"]
    assert page.status_code == 200
    repository = installed.data / "model_repository"
    assert f"the model repository {repository} has yolo11n" in doctor
    assert f"Triton is ready with the models in {repository}; its log is {home}/triton.log" in log.read_text(encoding="utf-8")
    assert not list(installed.folder.iterdir())
    assert [path.name for path in repository.glob("[!.]*")] == ["yolo11n"]
