"""An engine for containers, the images on it, built once in a session, and a Triton for their user."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from PIL import Image

from app import __version__
from app.settings.schema import TRITON_SOCKET, Settings
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


def write_pip_settings(root: Path) -> None:
    """Write the files by which pip in another root reaches the index that this machine's pip uses."""
    lines = ["[global]"]
    for option in ("index-url", "cert"):
        asked = [sys.executable, "-m", "pip", "config", "get", f"global.{option}"]
        value = os.environ.get(f"PIP_{option.upper().replace('-', '_')}")
        value = value or subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        if value and option == "cert":
            (certificates := root / "run" / "ca.crt").parent.mkdir(parents=True, exist_ok=True)
            certificates.write_bytes(Path(value).read_bytes())
            value = "/run/ca.crt"
        if value:
            lines.append(f"{option} = {value}")
    (settings := root / "etc" / "pip.conf").parent.mkdir(parents=True, exist_ok=True)
    settings.write_text("\n".join(lines), encoding="utf-8")


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


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """An engine with Debian's base image, made without a registry under the name that the Containerfile uses."""
    require_program("debootstrap", "debootstrap")
    with engine(tmp_path_factory.mktemp("docker")) as docker:
        docker.succeed(BUILDING / "base")
        machine = tmp_path_factory.mktemp("base") / "machine"
        write_pip_settings(machine)
        (machine / "Dockerfile").write_text("FROM localhost/debian:trixie-slim\nCOPY etc /etc\nCOPY run /run\n", encoding="ascii")
        docker("build", "--tag=docker.io/library/debian:trixie-slim", machine)
        yield docker


@pytest.fixture(scope="session")
def images(docker: Docker) -> dict[str, str]:
    """The names of the images by their targets. The last one is built from the layers of the other."""
    for target in ("embedded", "api"):
        docker.succeed(BUILDING / "build", target, "--network=host", f"--build-arg=SOURCE={SOURCE}")
    return {"api": f"nereid:{__version__}", "embedded": f"nereid:{__version__}-embedded"}


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
