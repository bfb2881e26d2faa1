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
from typing import NamedTuple

import httpx
import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app import __version__
from bench.harness.processes import wait_for_answer
from tests.deploy.containers import READY_SECONDS, SOURCE, USER, Container, Image, pip_volumes, stop, temporary_folder
from tests.imaging.samples import AVIF, HEIC
from tests.processes import no_process_left, wait_for
from tests.support import ROOT, free_port, sample_image
from tests.support import json as json_of

SAMPLES = ("chelsea.jpg", "coffee.jpg", "astronaut.jpg")
API_BYTES = 470_000_000
EMBEDDED_BYTES = 1_040_000_000

packages = pytest.mark.packages
pytestmark = pytest.mark.timeout(1800)


def test_hadolint_has_no_complaint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint has no package for this machine")

    done = subprocess.run([hadolint, ROOT / "Containerfile"], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def what_is_run(folder: Path, builder: str, *arguments: str) -> list[str]:
    """Return how `deploy/container/build` calls a builder, which need not be installed."""
    program = folder / builder
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {builder} \"$@\"\n", encoding="utf-8")
    program.chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "BUILDER": builder}
    build = ROOT / "deploy" / "container" / "build"
    return subprocess.run([build, *arguments], env=environ, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize(
    ("builder", "arguments", "image", "options"),
    [
        ("podman", [], ["--target", "api", "--tag", f"nereid:{__version__}"], []),
        ("docker", ["--no-cache"], ["--target", "api", "--tag", f"nereid:{__version__}"], ["--no-cache"]),
        ("buildah", ["embedded", "--pull"], ["--target", "embedded", "--tag", f"nereid:{__version__}-embedded"], ["--pull"]),
    ],
)
def test_each_builder_gets_target_tag_and_options(
    tmp_path: Path, builder: str, arguments: list[str], image: list[str], options: list[str]
) -> None:
    """Docker builds in a format that has a health check; the others must be told to."""
    program, *given = what_is_run(tmp_path, builder, *arguments)

    assert program == builder
    assert ("--format=docker" in given) == (builder != "docker")
    assert given[given.index("--target") :][:4] == image
    assert f"VERSION={__version__}" in given
    assert given[-1 - len(options) :] == [*options, "."]


class Outside(NamedTuple):
    """What a container of the API needs of this machine."""

    settings: dict[str, object]
    volumes: dict[Path, str]


@pytest.fixture
def outside(triton_of_containers: str, tmp_path: Path) -> Outside:
    """A Triton that runs on this machine, and a folder for /tmp."""
    given = {"port": free_port(), "workers": 2, "triton_endpoints": triton_of_containers}
    return Outside(given, temporary_folder(tmp_path / "tmp"))


async def check_answers(inside: httpx.AsyncClient, outside: httpx.AsyncClient) -> None:
    """Check that both find the same in the sample images."""
    for name in SAMPLES:
        answers = [json_of(await each.post("/detect", content=sample_image(name))) for each in (inside, outside)]
        assert answers[0]["detections"] == answers[1]["detections"] != []
    for file in (AVIF, HEIC):
        assert (await inside.post("/detect", content=file)).status_code == 200


@packages
async def test_api_in_a_container_answers_like_one_outside(
    api: Image, outside: Outside, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    container = Container(api, outside.volumes, outside.settings)
    url, log = f"http://127.0.0.1:{outside.settings['port']}", tmp_path / "api.log"
    with no_process_left(), container.running(log) as process:
        assert wait_for_answer(f"{url}/readyz", process, READY_SECONDS, retry=[503]) == 200, log.read_text()
        async with httpx.AsyncClient(base_url=url, timeout=60) as inside:
            await check_answers(inside, client)
            health = json_of(await inside.get("/health"))
        healthy = container.run(*api.health_check)
        code = stop(process)
    unhealthy = container.run(*api.health_check)

    assert health["tritons"][0]["transport"] == "shm"
    assert (healthy.returncode, healthy.stdout) == (0, "")
    assert code == 0, log.read_text()
    assert (unhealthy.returncode, unhealthy.stdout) == (1, f"{url} does not answer\n")
    (written,) = outside.volumes
    assert list(written.iterdir()) == []


@packages
def test_a_stop_during_the_start_is_not_lost(api: Image, outside: Outside, tmp_path: Path) -> None:
    """The kernel ignores a signal to process 1 as long as that does not handle it; the init does so at once."""
    log = tmp_path / "api.log"
    with no_process_left(), Container(api, outside.volumes, outside.settings).running(log) as process:
        wait_for(lambda: [first.name() for first in psutil.Process(process.pid).children()] == ["tini"])
        code = stop(process)

    assert code in {0, 128 + signal.SIGINT, 128 + signal.SIGTERM}, log.read_text()


@packages
def test_the_root_can_be_read_only(api: Image, outside: Outside) -> None:
    script = (
        "id -u; id -g; id -G; for folder in / /opt/nereid /run /srv/nereid /tmp /dev/shm; do test -w $folder && echo $folder; done"
    )

    done = Container(api, outside.volumes, outside.settings).run("sh", "-c", script)

    assert done.stdout.split() == [str(USER)] * 3 + ["/tmp", "/dev/shm"]  # noqa: S108
    assert not [path for path in api.root.rglob("*") if path.lstat().st_uid == USER]


@packages
def test_image_says_what_it_is(api: Image) -> None:
    labels = {name.rpartition(".")[2]: value for name, value in api.config["Labels"].items() if "opencontainers" in name}
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    assert (labels["title"], labels["version"], labels["licenses"]) == ("Nereid", __version__, "Apache-2.0")
    assert labels["revision"].removesuffix("-dirty") == revision
    assert labels["source"] == SOURCE
    assert (list(api.config["ExposedPorts"]), api.config["StopSignal"]) == (["4603/tcp"], "SIGTERM")


@packages
def test_images_are_small(api: Image, embedded: Image) -> None:
    for image in (api, embedded):
        assert [path.name[:12] for path in image.root.glob("opt/nereid/lib/python3*/site-packages/pillow*.dist-info")] == [
            "pillow_simd-"
        ]
        assert not list(image.root.glob("usr/bin/*gcc*")) + list(image.root.glob("usr/include/python*"))
        assert not list(image.root.glob("opt/nereid/lib/python3*/site-packages/setuptools"))
    assert not list(api.root.glob("opt/nereid/lib/python3*/site-packages/pip"))
    assert api.bytes() < API_BYTES
    assert embedded.bytes() < EMBEDDED_BYTES


@packages
@pytest.mark.parametrize("name", ["api", "embedded"])
def test_libraries_of_wheels_are_as_published(name: str, request: pytest.FixtureRequest) -> None:
    """Some do not load any more once debug information is removed, which depends on Debian's `strip`."""
    (folder,) = request.getfixturevalue(name).root.glob("opt/nereid/lib/python3*/site-packages")
    checked = 0
    for record in folder.glob("*.dist-info/RECORD"):
        for path, digest, _ in csv.reader(record.read_text(encoding="utf-8").splitlines()):
            if ".libs/" in path or (path.startswith(("cv2/", "numpy/")) and path.endswith(".so")):
                found = base64.urlsafe_b64encode(hashlib.sha256((folder / path).read_bytes()).digest())
                assert digest == f"sha256={found.decode().rstrip('=')}", path
                checked += 1

    assert checked > 20


def locked(path: Path, python: str) -> set[str]:
    """Read from a lock file what is installed under a version of Python, as package URLs."""
    lines = [line.removesuffix("\\") for line in path.read_text(encoding="utf-8").splitlines() if line[:1].isalnum()]
    requirements = [Requirement(line) for line in lines]
    environment = {"python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
    return {
        f"pkg:pypi/{canonicalize_name(requirement.name)}@{str(requirement.specifier).removeprefix('==')}"
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


@packages
@pytest.mark.parametrize(
    ("name", "locks", "unlocked"),
    [
        ("api", ["requirements/api.txt"], set()),
        ("embedded", ["requirements/embedded.txt", "app/embedded/requirements.txt"], {"pip", "nvidia-pytriton"}),
    ],
)
def test_sbom_names_what_is_in_the_image(name: str, locks: list[str], unlocked: set[str], request: pytest.FixtureRequest) -> None:
    image: Image = request.getfixturevalue(name)
    python = Container(image, {}, {}).run("python3", "-c", "import platform; print(platform.python_version())").stdout.strip()
    bom = json.loads((image.root / "usr/share/nereid/sbom.cdx.json").read_text(encoding="utf-8"))
    named = {component["purl"].partition("?")[0] for component in bom["components"]}
    expected = set().union(*(locked(ROOT / lock, python) for lock in locks))
    status = (image.root / "var/lib/dpkg/status").read_text(encoding="utf-8")

    assert python.startswith("3.13.")
    assert (bom["bomFormat"], bom["metadata"]["component"]["name"]) == ("CycloneDX", "nereid-gateway")
    assert expected <= named
    others = {purl for purl in named - expected if purl.startswith("pkg:pypi/")}
    assert {purl.removeprefix("pkg:pypi/").partition("@")[0] for purl in others} == unlocked
    debian = [purl for purl in named if purl.startswith("pkg:deb/debian/")]
    assert len(debian) == status.count("\nStatus: install ok installed\n")


@packages
async def test_embedded_needs_nothing_else(embedded: Image, client: httpx.AsyncClient, tmp_path: Path) -> None:
    port = free_port()
    container = Container(embedded, pip_volumes(tmp_path), {"port": port}, is_read_only=False, shm_size="64m")
    url, log = f"http://127.0.0.1:{port}", tmp_path / "serve.log"
    with no_process_left(), container.running(log) as process:
        assert wait_for_answer(f"{url}/readyz", process, READY_SECONDS, retry=[503]) == 200, log.read_text()
        async with httpx.AsyncClient(base_url=url, timeout=60) as inside:
            await check_answers(inside, client)
        healthy = container.run(*embedded.health_check)
        code = stop(process)

    assert (healthy.returncode, healthy.stdout) == (0, "")
    assert code == 0, log.read_text()
