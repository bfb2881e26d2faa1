"""The files of a release, made once in a session; machines and an engine to run them; and a Triton for containers."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from PIL import Image

import debian_root
from app import __version__
from app.settings.schema import TRITON_SOCKET, Settings
from debian_root import DebianRoot
from tests.deploy.docker import Docker, engine
from tests.imaging.samples import AVIF, FORMATS, HEIC, encode
from tests.processes import require_program
from tests.support import IMAGES, ROOT, sample_image
from tests.support import json as json_of

SOURCE = "https://example.com/nereid"
"""Address of the code in the label of the images."""
USER = 10001
"""User and group of the images."""
BUILDING = ROOT / "deploy" / "container"


def answers(url: str) -> bool:
    """Return whether a server answers with 200."""
    with suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False


def check(url: str, right: Mapping[str, object]) -> None:
    """Check what every package must do: find the right objects by picture, read each format, and have the files of its pages."""
    for name, objects in right.items():
        assert json_of(httpx.post(f"{url}/detect", content=sample_image(name), timeout=60))["detections"] == objects != []
    picture = Image.open(IMAGES / "coffee.jpg").convert("RGB")
    for file in [*(encode(picture, image_format) for image_format in FORMATS), AVIF, HEIC]:
        assert httpx.post(f"{url}/detect", content=file, timeout=60).status_code == 200
    for path in ("docs-assets/swagger_style.css", "page-assets/page.js"):
        assert httpx.get(f"{url}/{path}").status_code == 200


class Release(NamedTuple):
    """The files of a release, as far as tests have made them."""

    folder: Path
    work: Path
    """Where minimal Debians are kept."""

    def command(self, *arguments: str) -> list[str]:
        """Return the command line that makes parts of it."""
        program = [sys.executable, str(ROOT / "deploy" / "release" / "make.py"), "--dry-run"]
        return [*program, f"--to={self.folder}", f"--work={self.work}", *arguments]


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    return Release(tmp_path_factory.mktemp("release"), tmp_path_factory.mktemp("work"))


@pytest.fixture(scope="session")
def make_debian(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], DebianRoot]:
    """Makes a machine that has nothing but a minimal Debian of this name."""
    if os.geteuid():
        pytest.skip("only root can make a machine's root folder")
    require_program("debootstrap", "debootstrap")
    return lambda suite: debian_root.make(suite, release.work, tmp_path_factory.mktemp("machine") / "root")


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """An engine with Debian's base image, made without a registry under the name that the Containerfile uses."""
    require_program("debootstrap", "debootstrap")
    with engine(tmp_path_factory.mktemp("docker")) as docker:
        docker.succeed(BUILDING / "base")
        machine = tmp_path_factory.mktemp("base") / "machine"
        debian_root.write_pip_settings(machine)
        (machine / "Dockerfile").write_text("FROM localhost/debian:trixie-slim\nCOPY etc /etc\nCOPY run /run\n", encoding="ascii")
        docker("build", "--tag=docker.io/library/debian:trixie-slim", machine)
        yield docker


@pytest.fixture(scope="session")
def images(docker: Docker, release: Release) -> dict[str, str]:
    """The names of the images by their targets, loaded from the files of a release into an engine that has them no more."""
    docker.succeed(*release.command("images", f"--source={SOURCE}", "--builder-option=--network=host"))
    names = {"api": f"nereid:{__version__}", "embedded": f"nereid:{__version__}-embedded"}
    docker("rmi", *names.values())
    for target in names:
        docker("load", "--input", release.folder / f"nereid-{__version__}-{target}-image.tar.gz")
    return names


@pytest.fixture
def triton_of_containers(served: Settings) -> Iterator[str]:
    """The address of the session's Triton, whose folder belongs to the user of the containers meanwhile."""
    paths: tuple[Path, ...] = (served.triton_folder, served.triton_folder / TRITON_SOCKET)
    for path in paths:
        os.chown(path, USER, USER)
    yield served.triton_address
    for path in paths:
        os.chown(path, os.getuid(), os.getgid())


@pytest.fixture(scope="session")
async def right(client: httpx.AsyncClient) -> dict[str, object]:
    """What the application finds in pictures, outside of any package."""
    names = ("astronaut.jpg", "chelsea.jpg", "coffee.jpg")
    return {name: json_of(await client.post("/detect", content=sample_image(name)))["detections"] for name in names}
