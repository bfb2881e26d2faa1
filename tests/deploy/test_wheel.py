"""The wheel, on a machine that has Python and nothing else: no compiler, no headers, no checkout."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from app import __version__
from bench.harness.processes import running
from tests.deploy.bare import HOME, Bare, environ, make_bare
from tests.deploy.containers import pip_volumes
from tests.support import ROOT, free_port, json, sample_image

pytestmark = pytest.mark.packages

READY_SECONDS = 300
STOP_SECONDS = 60
NEREID = "/srv/environment/bin/nereid"


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
def bare(wheel: Path, tmp_path: Path) -> Bare:
    """A machine with the packages that docs/how-to/install.md names, the wheel, an empty environment and an empty folder."""
    bare = make_bare(tmp_path / "root", "python3-venv", "libpython3.11")
    shutil.copy(wheel, bare.root / "srv")
    for source, path in pip_volumes(tmp_path).items():
        shutil.copy(source, bare.root / path.lstrip("/"))
    (bare.root / "srv" / "empty").mkdir()
    bare.run("python3", "-m", "venv", "/srv/environment").check_returncode()
    return bare


def test_first_boxes_without_a_compiler(wheel: Path, bare: Bare, tmp_path: Path) -> None:
    programs = [path.name for path in bare.root.glob("usr/bin/*")]
    assert not {"cc", "gcc", "c99", "clang"} & {*programs}
    assert not list(bare.root.glob("usr/include/**/*.h"))
    assert wheel.name == f"nereid_gateway-{__version__}-py3-none-any.whl"

    bare.run("/srv/environment/bin/pip", "install", "--quiet", f"/srv/{wheel.name}[models]").check_returncode()
    settings = environ({"NEREID_PORT": (port := free_port()), "NEREID_TIMEOUT_SECONDS": 30})
    variables = [f"{name}={value}" for name, value in settings.items()]
    command, log = bare.command("env", "-i", "-C", "/srv/empty", *variables, NEREID, "serve"), tmp_path / "serve.log"
    with running(command, {}, port, "/readyz", log, tmp_path, ready_seconds=READY_SECONDS) as server:
        answer = json(httpx.post(f"{server.url}/detect", content=sample_image("chelsea.jpg"), timeout=60))
        page = httpx.get(f"{server.url}/page-assets/page.js")
        doctor = bare.run(NEREID, "doctor", NEREID_PORT=port)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(STOP_SECONDS) == 0

    assert [found["class_name"] for found in answer["detections"]] == ["cat"]
    assert page.status_code == 200
    data, lines = f"{HOME}/.local/share/nereid", log.read_text(encoding="utf-8")
    assert f"Triton is ready with the models in {data}/model_repository; its log is {data}/.triton/triton.log" in lines
    assert lines.count("warning: ") == lines.count("warning: stock Pillow ") == 1
    assert "0 failures, 1 warning\n" in doctor.stdout
    assert bare.run(NEREID, "--version").stdout == f"nereid {__version__}\n"
    assert bare.run(NEREID, "models").stdout.startswith("yolo11n: 80 classes, 640 x 640, ")
    assert not list((bare.root / "srv" / "empty").iterdir())
    assert [path.name for path in (bare.root / data.lstrip("/") / "model_repository").glob("[!.]*")] == ["yolo11n"]
