"""The container images, both of them built and run."""

import base64
import csv
import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path

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

BYTES = {"api": 470_000_000, "embedded": 1_040_000_000}

packages = pytest.mark.packages
pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    ("builder", "arguments", "target", "tag"),
    [("podman", [], "api", ""), ("docker", ["embedded", "--pull"], "embedded", "-embedded")],
)
def test_each_builder_gets_target_tag_and_options(
    tmp_path: Path, builder: str, arguments: list[str], target: str, tag: str
) -> None:
    """Docker builds in a format that has a health check; the others must be told to."""
    (program := tmp_path / builder).write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n", encoding="utf-8")
    program.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BUILDER": builder}
    command = [str(ROOT / "deploy" / "container" / "build"), *arguments]
    given = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout.splitlines()

    assert ("--format=docker" in given) == (builder != "docker")
    assert given[given.index("--target") :][:4] == ["--target", target, "--tag", f"nereid:{__version__}{tag}"]
    assert f"VERSION={__version__}" in given
    assert given[-len(arguments[1:]) - 1 :] == [*arguments[1:], "."]


@pytest.fixture
def api_container(api: Image, triton_of_containers: str, tmp_path: Path) -> Container:
    """The API, with a Triton that runs on this machine, and a folder for /tmp."""
    settings = {"port": free_port(), "workers": 2, "triton_endpoints": triton_of_containers}
    return Container(api, temporary_folder(tmp_path / "tmp"), settings)


async def check(container: Container, outside: httpx.AsyncClient, folder: Path) -> dict[str, object]:
    """Run a container until it has answered like the gateway outside; return its health. The stop must be in order."""
    url, log = f"http://127.0.0.1:{container.settings['port']}", folder / "container.log"
    with no_process_left(), container.running(log) as process:
        assert wait_for_answer(f"{url}/readyz", process, READY_SECONDS, retry=[503]) == 200, log.read_text()
        async with httpx.AsyncClient(base_url=url, timeout=60) as inside:
            for name in ("chelsea.jpg", "coffee.jpg", "astronaut.jpg"):
                answers = [json_of(await each.post("/detect", content=sample_image(name))) for each in (inside, outside)]
                assert answers[0]["detections"] == answers[1]["detections"] != []
            for file in (AVIF, HEIC):
                assert (await inside.post("/detect", content=file)).status_code == 200
            health: dict[str, object] = json_of(await inside.get("/health"))
        assert container.check_health() == (0, "")
        assert stop(process) == 0, log.read_text()
    return health


@packages
async def test_api_in_a_container_answers_like_one_outside(
    api_container: Container, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    health = await check(api_container, client, tmp_path)
    (written,) = api_container.volumes

    assert api_container.check_health() == (1, f"http://127.0.0.1:{api_container.settings['port']} does not answer\n")
    assert "'transport': 'shm'" in str(health["tritons"])
    assert list(written.iterdir()) == []


@packages
async def test_embedded_image_needs_nothing_else(embedded: Image, client: httpx.AsyncClient, tmp_path: Path) -> None:
    container = Container(embedded, pip_volumes(tmp_path), {"port": free_port()}, is_read_only=False, shm_size="64m")

    await check(container, client, tmp_path)


@packages
def test_stop_during_the_start_is_not_lost(api_container: Container, tmp_path: Path) -> None:
    """The kernel ignores a signal to process 1 as long as that does not handle it; the init does so at once."""
    log = tmp_path / "api.log"
    with no_process_left(), api_container.running(log) as process:
        wait_for(lambda: [first.name() for first in psutil.Process(process.pid).children()] == ["tini"])
        assert stop(process) in {0, 128 + signal.SIGINT, 128 + signal.SIGTERM}, log.read_text()


@packages
def test_root_can_be_read_only_and_belongs_to_another_user(api_container: Container) -> None:
    folders = "/ /opt/nereid /run /srv/nereid /tmp /dev/shm"
    done = api_container.run("sh", "-c", f"id -u; id -g; id -G; for folder in {folders}; do test -w $folder && echo $folder; done")

    assert done.stdout.split() == [str(USER)] * 3 + ["/tmp", "/dev/shm"]  # noqa: S108
    assert not [path for path in api_container.image.root.rglob("*") if path.lstat().st_uid == USER]


@packages
@pytest.mark.parametrize("name", BYTES)
def test_image_is_small_and_has_libraries_as_published(name: str, request: pytest.FixtureRequest) -> None:
    """Some do not load any more once debug information is removed, which depends on Debian's `strip`."""
    image: Image = request.getfixturevalue(name)
    (folder,) = image.root.glob("opt/nereid/lib/python3*/site-packages")
    sizes = (os.lstat(Path(parent, file)).st_size for parent, _, files in os.walk(image.root) for file in files)
    assert sum(sizes) < BYTES[name]
    assert [path.name[:12] for path in folder.glob("pillow*.dist-info")] == ["pillow_simd-"]
    assert not [*image.root.glob("usr/bin/*gcc*"), *image.root.glob("usr/include/python*"), *folder.glob("setuptools")]
    assert name == "embedded" or not (folder / "pip").exists()
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
    environment = {"python_full_version": python, "python_version": ".".join(python.split(".")[:2])}
    return {
        f"pkg:pypi/{canonicalize_name(requirement.name)}@{str(requirement.specifier).removeprefix('==')}"
        for requirement in map(Requirement, lines)
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
def test_labels_and_sbom_name_what_is_in_the_image(
    name: str, locks: list[str], unlocked: set[str], request: pytest.FixtureRequest
) -> None:
    image: Image = request.getfixturevalue(name)
    python = Container(image, {}, {}).run("python3", "-c", "import platform; print(platform.python_version())").stdout.strip()
    bom = json.loads((image.root / "usr/share/nereid/sbom.cdx.json").read_text(encoding="utf-8"))
    named = {component["purl"].partition("?")[0] for component in bom["components"]}
    expected = set().union(*(locked(ROOT / lock, python) for lock in locks))
    others = {purl.partition("@")[0].removeprefix("pkg:pypi/") for purl in named - expected if purl.startswith("pkg:pypi/")}
    status = (image.root / "var/lib/dpkg/status").read_text(encoding="utf-8")
    labels = {key.rpartition(".")[2]: value for key, value in image.config["Labels"].items() if "opencontainers" in key}
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    assert python.startswith("3.13.")
    assert expected <= named
    assert others == unlocked
    debian = [purl for purl in named if purl.startswith("pkg:deb/debian/")]
    assert len(debian) == status.count("\nStatus: install ok installed\n")
    assert (labels["version"], labels["revision"].removesuffix("-dirty"), labels["source"]) == (__version__, revision, SOURCE)
    assert image.config["StopSignal"] == "SIGTERM"
