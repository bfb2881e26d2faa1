"""The container images: what hadolint says of the Containerfile, and both of them built and run."""

import base64
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app import __version__
from bench.harness.processes import wait_for_answer
from tests.deploy.conftest import READY_SECONDS, SOURCE, USER, Built, Container, check, pip_volumes, stop, temporary_folder
from tests.processes import no_process_left, wait_for
from tests.support import ROOT, free_port

LOCKS = {"api": ["requirements/api.txt"], "embedded": ["requirements/embedded.txt", "app/embedded/requirements.txt"]}
UNLOCKED: dict[str, set[str]] = {"api": set(), "embedded": {"pip", "nvidia-pytriton"}}
MAX_BYTES = {"api": 470_000_000, "embedded": 1_040_000_000}

packages = pytest.mark.packages
pytestmark = pytest.mark.timeout(1800)


def test_hadolint_has_no_complaint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has no package for this machine")
    done = subprocess.run([hadolint, ROOT / "Containerfile"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.fixture
def container(api: Built, triton_of_containers: str, tmp_path: Path) -> Container:
    """One of the API, with a Triton that runs on this machine, and a folder for /tmp."""
    settings = {"port": free_port(), "workers": 2, "triton_endpoints": triton_of_containers}
    return Container(api, temporary_folder(tmp_path / "tmp"), settings)


def check_container(container: Container, right: dict[str, object], log: Path) -> None:
    """Check that a container answers as outside, is then healthy, and stops in order."""
    url = f"http://127.0.0.1:{container.settings['port']}"
    with no_process_left(), container.running(log) as process:
        assert wait_for_answer(f"{url}/readyz", process, READY_SECONDS, retry=[503]) == 200, log.read_text()
        check(url, right)
        healthy = container.run(*container.image.health_check)
        code = stop(process)

    assert (healthy.returncode, healthy.stdout, code) == (0, "", 0), log.read_text()


@packages
def test_api_answers_as_outside_and_stops_in_order(container: Container, right: dict[str, object], tmp_path: Path) -> None:
    check_container(container, right, tmp_path / "api.log")
    unhealthy = container.run(*container.image.health_check)

    assert (unhealthy.returncode, unhealthy.stdout) == (1, f"http://127.0.0.1:{container.settings['port']} does not answer\n")
    assert list((tmp_path / "tmp").iterdir()) == []


@packages
def test_stop_during_the_start_is_not_lost(container: Container, tmp_path: Path) -> None:
    """The kernel ignores a signal to process 1 as long as that does not handle it; the init does so at once."""
    with no_process_left(), container.running(log := tmp_path / "api.log") as process:
        wait_for(lambda: [first.name() for first in psutil.Process(process.pid).children()] == ["tini"])
        code = stop(process)

    assert code in {0, 128 + signal.SIGINT, 128 + signal.SIGTERM}, log.read_text()


@packages
def test_user_of_a_read_only_root_writes_temporary_files_alone(container: Container) -> None:
    folders = "/ /opt/nereid /run /srv/nereid /tmp /dev/shm"
    done = container.run("sh", "-c", f"id -u; id -g; id -G; for name in {folders}; do test -w $name && echo $name; done")

    assert done.stdout.split() == [str(USER)] * 3 + ["/tmp", "/dev/shm"]  # noqa: S108
    assert not [path for path in container.image.root.rglob("*") if path.lstat().st_uid == USER]


def locked(path: Path, python: str) -> set[str]:
    """Read from a lock file what is installed under a version of Python, as package URLs."""
    requirements = [Requirement(line.removesuffix("\\")) for line in path.read_text().splitlines() if line[:1].isalnum()]
    environment = {"python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
    return {
        f"pkg:pypi/{canonicalize_name(requirement.name)}@{str(requirement.specifier).removeprefix('==')}"
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


@packages
@pytest.mark.parametrize("name", LOCKS)
def test_image_is_small_and_says_what_it_is_and_has(name: str, request: pytest.FixtureRequest) -> None:
    """Some libraries of wheels do not load any more once debug information is removed, which depends on Debian's `strip`."""
    image: Built = request.getfixturevalue(name)
    labels = {name.rpartition(".")[2]: value for name, value in image.config["Labels"].items() if "opencontainers" in name}
    revision = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    assert (labels["title"], labels["version"], labels["source"]) == ("Nereid", __version__, SOURCE)
    assert labels["revision"].removesuffix("-dirty") == revision
    assert image.config["StopSignal"] == "SIGTERM"

    files = [Path(folder, file) for folder, _, names in os.walk(image.root) for file in names]
    assert sum(os.lstat(file).st_size for file in files) < MAX_BYTES[name]
    (packages,) = image.root.glob("opt/nereid/lib/python3*/site-packages")
    assert len([*packages.glob("pillow_simd-*.dist-info")]) == len([*packages.glob("pillow*.dist-info")]) == 1
    assert not [*image.root.glob("usr/bin/*gcc*"), *image.root.glob("usr/include/python*"), *packages.glob("setuptools")]
    checked = 0
    for record in packages.glob("*.dist-info/RECORD"):
        for path, digest, _ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
            if ".libs/" in path or (path.startswith(("cv2/", "numpy/")) and path.endswith(".so")):
                found = base64.urlsafe_b64encode(hashlib.sha256((packages / path).read_bytes()).digest())
                assert digest == f"sha256={found.decode().rstrip('=')}", path
                checked += 1
    assert checked > 20

    python = Container(image, {}, {}).run("python3", "-c", "import platform; print(platform.python_version())").stdout.strip()
    components = json.loads((image.root / "usr/share/nereid/sbom.cdx.json").read_text(encoding="utf-8"))["components"]
    named = {component["purl"].partition("?")[0] for component in components}
    expected = set().union(*(locked(ROOT / lock, python) for lock in LOCKS[name]))
    others = {purl for purl in named - expected if purl.startswith("pkg:pypi/")}
    status = (image.root / "var/lib/dpkg/status").read_text(encoding="utf-8")
    assert expected <= named
    assert {purl.removeprefix("pkg:pypi/").partition("@")[0] for purl in others} == UNLOCKED[name]
    assert sum(purl.startswith("pkg:deb/debian/") for purl in named) == status.count("\nStatus: install ok installed\n")


@packages
def test_embedded_needs_nothing_else(embedded: Built, right: dict[str, object], tmp_path: Path) -> None:
    container = Container(embedded, pip_volumes(tmp_path), {"port": free_port()}, is_read_only=False, shm_size="64m")
    check_container(container, right, tmp_path / "serve.log")
