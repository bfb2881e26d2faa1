"""The container images, built at most once in a session, and a Triton that their user can use."""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.settings.schema import TRITON_SOCKET, Settings
from tests.deploy.containers import SOURCE, USER, Builder, Built
from tests.support import ROOT, json, sample_image


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    made = Builder(tmp_path_factory.mktemp("storage"))
    try:
        made.run(ROOT / "deploy" / "container" / "base")
        yield made
    finally:
        made.close()


@pytest.fixture(scope="session")
def api(builder: Builder) -> Built:
    return builder.unpack(builder.build("api", f"--build-arg=SOURCE={SOURCE}"))


@pytest.fixture(scope="session")
def embedded(builder: Builder) -> Built:
    # With the same source, because both images share the layers with the labels, whichever is built first.
    return builder.unpack(builder.build("embedded", f"--build-arg=SOURCE={SOURCE}"))


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
    return {name: json(await client.post("/detect", content=sample_image(name)))["detections"] for name in names}
