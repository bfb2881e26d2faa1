"""The container images: what hadolint says of the Containerfile, and both of them built and run."""

import base64
import csv
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app import __version__
from tests.deploy.conftest import SOURCE, USER, Release, answers, check
from tests.deploy.docker import Docker
from tests.processes import wait_for
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


def stop_after_check(docker: Docker, right: Mapping[str, object], *options: str) -> int:
    """Run a container on this machine's network until it does what it must do; return the exit code with which it stops."""
    port = free_port()
    settings = [f"--env=NEREID_PORT={port}", "--env=NEREID_TIMEOUT_SECONDS=30"]
    with docker.running("--network=host", "--health-interval=1s", *settings, *options) as container:

        def is_ready() -> bool:
            state = docker.inspect(container)["State"]
            assert state["Running"], docker("logs", container)
            return state["Health"]["Status"] == "healthy" and answers(f"http://127.0.0.1:{port}/readyz")

        wait_for(is_ready)
        check(f"http://127.0.0.1:{port}", right)
        return docker.stop(container)


def idle(docker: Docker, image: str, *options: str) -> AbstractContextManager[str]:
    """Run a container in which nothing happens."""
    return docker.running(*options, "--entrypoint=sleep", image, "infinity")


@packages
def test_api_answers_as_outside_and_stops_in_order(
    docker: Docker, images: dict[str, str], triton_of_containers: str, right: dict[str, object], tmp_path: Path
) -> None:
    (temporary := tmp_path / "tmp").mkdir()
    temporary.chmod(0o1777)
    triton = ["--ipc=host", f"--env=NEREID_TRITON_ENDPOINTS={triton_of_containers}"]
    options = ["--read-only", f"--volume={temporary}:/tmp", "--env=NEREID_WORKERS=2", *triton]

    assert stop_after_check(docker, right, *options, images["api"]) == 0
    assert list(temporary.iterdir()) == []


@packages
def test_stop_during_the_start_is_not_lost(docker: Docker, images: dict[str, str]) -> None:
    """The kernel ignores a signal to process 1 as long as that does not handle it; the init does so at once."""
    with docker.running("--read-only", "--tmpfs=/tmp", images["api"]) as container:
        assert docker.stop(container) in {0, 128 + signal.SIGINT, 128 + signal.SIGTERM}


@packages
def test_user_of_a_read_only_root_writes_temporary_files_alone(docker: Docker, images: dict[str, str]) -> None:
    look = "id -u; id -g; id -G; for name in / /opt/nereid /run /srv/nereid /tmp /dev/shm; do test -w $name && echo $name; done"
    with idle(docker, images["api"], "--read-only", "--tmpfs=/tmp") as container:
        said = docker.run("docker", "exec", container, "sh", "-c", look).stdout
        own = [path for path in docker.root(container).rglob("*") if path.lstat().st_uid == USER]

    assert said.split() == [str(USER)] * 3 + ["/tmp", "/dev/shm"]  # noqa: S108
    assert own == []


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
def test_image_is_small_and_says_what_it_is_and_has(name: str, docker: Docker, images: dict[str, str], release: Release) -> None:
    """Some libraries of wheels do not load any more once debug information is removed, which depends on Debian's `strip`."""
    config = docker.inspect(images[name])["Config"]
    labels = {name.rpartition(".")[2]: value for name, value in config["Labels"].items() if "opencontainers" in name}
    revision = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    assert (labels["title"], labels["version"], labels["source"]) == ("Nereid", __version__, SOURCE)
    assert labels["revision"].removesuffix("-dirty") == revision
    assert config["StopSignal"] == "SIGTERM"

    with idle(docker, images[name]) as container:
        root = docker.root(container)
        files = [Path(folder, file) for folder, _, names in os.walk(root) for file in names]
        assert sum(os.lstat(file).st_size for file in files) < MAX_BYTES[name]
        (packages,) = root.glob("opt/nereid/lib/python3*/site-packages")
        assert len([*packages.glob("pillow_simd-*.dist-info")]) == len([*packages.glob("pillow*.dist-info")]) == 1
        assert not [*root.glob("usr/bin/*gcc*"), *root.glob("usr/include/python*"), *packages.glob("setuptools")]
        checked = 0
        for record in packages.glob("*.dist-info/RECORD"):
            for path, digest, _ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
                if ".libs/" in path or (path.startswith(("cv2/", "numpy/")) and path.endswith(".so")):
                    found = base64.urlsafe_b64encode(hashlib.sha256((packages / path).read_bytes()).digest())
                    assert digest == f"sha256={found.decode().rstrip('=')}", path
                    checked += 1
        assert checked > 20

        python = docker("exec", container, "python3", "-c", "import platform; print(platform.python_version())")
        sbom = (root / "usr/share/nereid/sbom.cdx.json").read_bytes()
        assert (release.folder / f"nereid-{__version__}-{name}-image.cdx.json").read_bytes() == sbom
        components = json.loads(sbom)["components"]
        named = {component["purl"].partition("?")[0] for component in components}
        expected = set().union(*(locked(ROOT / lock, python) for lock in LOCKS[name]))
        others = {purl for purl in named - expected if purl.startswith("pkg:pypi/")}
        status = (root / "var/lib/dpkg/status").read_text(encoding="utf-8")
        assert expected <= named
        assert {purl.removeprefix("pkg:pypi/").partition("@")[0] for purl in others} == UNLOCKED[name]
        assert sum(purl.startswith("pkg:deb/debian/") for purl in named) == status.count("\nStatus: install ok installed\n")


@packages
def test_embedded_needs_nothing_else(docker: Docker, images: dict[str, str], right: dict[str, object]) -> None:
    assert stop_after_check(docker, right, "--shm-size=64m", images["embedded"]) == 0
