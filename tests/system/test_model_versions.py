"""Models are added, changed and removed while `serve` runs: no request fails, and each answer is that of the version it names."""

import asyncio
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest

from tests.fakes import models
from tests.faults.exchange import NO_ANSWER, Connection, encode
from tests.faults.fleet import running_fleet
from tests.faults.meanwhile import meanwhile
from tests.nginx import proxying
from tests.processes import run_nereid, wait_for
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import SCENE, eventually
from tests.zoo.exported import WIDE, exported

VERSIONS = 6
OLDER = VERSIONS - 1
CLIENTS = 16


class Service(NamedTuple):
    """A `serve`, and the commands that change its models."""

    url: str
    folder: Path
    repository: Path
    settings: Mapping[str, object]

    def run(self, *arguments: object, status: int = 0) -> str:
        done = run_nereid(*arguments, **self.settings)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    def add(self, version: int, name: str = "doors") -> str:
        return self.run("add", export(version, self.folder), "--name", name)

    def model(self, name: str) -> dict[str, Any] | None:
        listed = httpx.get(f"{self.url}/models", timeout=30).json()["models"]
        return next((one for one in listed if one["name"] == name), None)

    def answer(self, name: str, query: str = "") -> tuple[int, str]:
        response = httpx.post(f"{self.url}/predict/{name}{query}", content=SCENE, timeout=30)
        return response.status_code, version_of(response.content) if response.is_success else response.json()["code"]

    def wait_for(self, name: str, expected: tuple[int, str]) -> None:
        """Wait until this is the answer; each worker looks for changes every second."""
        wait_for(lambda: self.answer(name) == expected)


def export(version: int, folder: Path) -> Path:
    """Export a network that finds one object in every image, whose class is that of the version."""
    anchors = np.zeros((4 + VERSIONS, 672))
    anchors[:4, 0], anchors[3 + version, 0] = (128, 64, 60, 40), 0.9
    network = exported({"output0": anchors}, WIDE, names={index: f"version {index + 1}" for index in range(VERSIONS)})
    path = folder / f"{version}.onnx"
    path.write_bytes(network.SerializeToString())
    return path


def version_of(body: bytes) -> str:
    """Return the version that an answer names, which must be the one whose object it contains."""
    answer = json.loads(body)
    version = str(answer["model"]["version"])
    assert [found["class_name"] for found in answer["detections"]] == [f"version {version}"]
    return version


@contextmanager
def service(folder: Path, instances: int = 2, **more: object) -> Iterator[Service]:
    """Run `serve` with a small default model and with a network that has no config, and NGINX in front of it."""
    models.write(folder / "all")
    repository = folder / "models"
    (repository / "best").mkdir(parents=True)
    (folder / "all" / "six_columns").rename(repository / "six_columns")
    export(1, repository / "best")
    settings = {"model": "six_columns", "timeout_seconds": 20, **more}
    with (
        running_fleet(repository, folder, instances=instances, settings=settings) as fleet,
        proxying([f"unix:{socket}" for socket in fleet.sockets], fleet.folder / "run") as proxy,
    ):
        given = {"triton_home": folder / "triton", "model_repository": repository, **more}
        yield Service(proxy.local_url, folder, repository, given)


class Traffic:
    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses = Counter[int]()
        self.versions: list[str] = []
        """The versions that have answered, in the order of their answers."""

    async def run_client(self) -> None:
        while True:
            async with await Connection.open(self.url) as connection:
                while await self._ask(connection):
                    pass

    async def wait_for(self, version: int) -> None:
        """Wait until this version alone answers; a worker that answers nothing meanwhile may follow later."""
        await eventually(lambda: set(self.versions[-2 * CLIENTS :]) == {str(version)})

    async def _ask(self, connection: Connection) -> bool:
        """Send one request; return whether the connection can be used again."""
        answer = await connection.ask(encode(SCENE, "/predict/doors"))
        self.statuses[answer.status] += 1
        if answer.status == 200:
            self.versions.append(version_of(answer.body))
        return answer.status != NO_ANSWER and answer.headers.get("connection") != "close"


@pytest.fixture(scope="module")
def serving() -> Iterator[Service]:
    with TemporaryDirectory() as folder, service(Path(folder)) as serving:
        yield serving


def test_folder_without_config_is_told_and_can_be_added(serving: Service) -> None:
    folder = serving.repository / "best"
    said = f"{folder} has no config.pbtxt; `nereid add {folder}` makes a model of the network in it"
    listed = serving.model("best")
    assert listed is not None
    assert (listed["state"], listed["detail"]) == ("no_config", said)
    assert f"nereid: warning: best could not be loaded: {said}\n" in (serving.folder / "serve.log").read_text(encoding="utf-8")
    serving.run("add", folder)
    serving.wait_for("best", (200, "1"))


def test_models_are_listed_although_the_folder_of_one_is_gone(serving: Service) -> None:
    serving.add(1, "garage")
    shutil.rmtree(serving.repository / "garage")

    wait_for(lambda: httpx.get(f"{serving.url}/models", timeout=30).status_code == 200)  # at once it may be 502
    assert serving.model("six_columns") is not None


@pytest.mark.timeout(300)  # it runs fifteen commands, one after the other, while the clients take most of the CPU time
async def test_switching_fails_no_request(serving: Service) -> None:
    assert "nereid: POST /predict/doors uses it\n" in serving.add(1)
    serving.wait_for("doors", (200, "1"))
    description = serving.repository / "doors" / "model.toml"  # the next versions start sooner with one process each
    description.write_text(description.read_text(encoding="utf-8").replace("instances = 2", "instances = 1"), encoding="utf-8")
    traffic = Traffic(serving.url)
    async with meanwhile(*(traffic.run_client() for _ in range(CLIENTS))):
        for version in range(2, VERSIONS + 1):
            await asyncio.to_thread(serving.add, version)
            await traffic.wait_for(version)
            old = version - 1
            assert await asyncio.to_thread(serving.answer, "doors", f"?version={old}") == (200, str(old))
            if version < VERSIONS:  # Triton loads all versions again for each change
                await asyncio.to_thread(serving.run, "remove", f"doors:{old}")
        for version in (OLDER, VERSIONS, OLDER, VERSIONS, OLDER):
            await asyncio.to_thread(serving.run, "use", f"doors:{version}")
            await traffic.wait_for(version)

    assert traffic.statuses.keys() == {200}
    expected = {"version": str(OLDER), "versions": [str(OLDER), str(VERSIONS)]}
    wait_for(lambda: expected.items() <= (serving.model("doors") or {}).items())  # the last worker may follow later
    said = await asyncio.to_thread(serving.run, "models")
    usage = r"[1-9]\d* MiB, \d+\.\d ms a batch on the CPU \(CPUExecutionProvider\)"
    assert re.search(rf"doors: 6 classes, .*, versions 5 \(default\), 6, {usage}\n", said)


def test_version_that_triton_cannot_load_is_withdrawn(serving: Service) -> None:
    """Triton loads all versions again, also one whose file was damaged meanwhile."""
    for version in (1, 2):
        serving.add(version, "windows")
    damaged = serving.repository / "windows" / "1" / "model.onnx"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1000])
    said = serving.run("add", export(3, serving.folder), "--name", "windows", status=1)

    assert "Triton cannot load windows" in said
    for query, answered in (("", "2"), ("?version=1", "1")):
        assert serving.answer("windows", query) == (200, answered)
    assert sorted(path.name for path in (serving.repository / "windows").glob("[0-9]")) == ["1", "2"]
    damaged.write_bytes(whole)
    serving.add(4, "windows")  # what engines are named by is not used again
    serving.wait_for("windows", (200, "4"))
