"""What is off by default, together: whatever else is on, images are answered, and models change by HTTP and by command."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.embedded.server import EmbeddedTriton
from app.settings.schema import DIALECTS, Settings
from app.zoo import description
from tests.api.conftest import write_keys
from tests.fakes import models, other_tasks
from tests.fakes.otlp import Receiver, receiving_traces
from tests.faults.serving import running_gateway
from tests.processes import run_nereid
from tests.support import SCENE, triton_home
from tests.system.test_model_versions import export

DEFAULT = "person_and_car"
MODELS = (DEFAULT, "embedding", "faces_detection", "faces_description", "ocr_detection", "ocr_direction", "ocr_recognition")
SETTINGS: dict[str, dict[str, object]] = {
    "cache": {"cache": "memory"},
    "routes": {},
    "cascades": {},
    "search": {"search": "on"},
    "on demand": {"loaded_models": 2 * len(MODELS)},
    "dialects": {"dialects": ",".join(DIALECTS)},
    "faces": {"faces": True},
    "tracing": {"tracing": True},
}
"""What turns each feature on; routes and cascades have files."""
ROUTE = f'[front]\nto = "{DEFAULT}"\n'
CASCADE = f'[steps.shape]\nmodel = "{DEFAULT}"\n[steps.vector]\nmodel = "embedding"\nof = "shape"\n'
PATHS = {
    "routes": "/predict/front",
    "cascades": "/predict/shapes",
    "search": "/ingest",
    "dialects": "/v1/vision/detection",
    "faces": "/faces/detect",
}
"""What is found only with the feature."""
EVERY = frozenset(SETTINGS)
ROWS = {"all": EVERY, "none": frozenset[str](), **{f"all but {name}": EVERY - {name} for name in SETTINGS}}
"""Each pair of features is tried in each combination."""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("together")
    models.write(folder / "all")
    other_tasks.write_readers(folder / "all")
    for name in MODELS:
        shutil.copytree(folder / "all" / name, folder / "models" / name)
    return Settings(model_repository=str(folder / "models"), triton_home=triton_home(folder), model=DEFAULT)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    with receiving_traces() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


class Operator:
    """Uses a gateway and changes its models, and notes what fails."""

    def __init__(self, settings: dict[str, object], folder: Path) -> None:
        self.settings = settings
        self.network = export(1, folder)
        self.client = httpx.AsyncClient(headers={"X-API-Key": "boss.secret"}, timeout=60)
        self.failures: list[str] = []

    async def ask(self, line: str, *, failure: int = 0, **more: Any) -> httpx.Response:  # noqa: ANN401 - what httpx takes
        """Send a request that succeeds, or that has this status."""
        method, _, path = line.partition(" ")
        response = await self.client.request(method, path, **more)
        if not (response.status_code == failure if failure else response.is_success):
            self.failures.append(f"{line}: {response.status_code} {response.text}")
        return response

    async def run(self, *arguments: str) -> None:
        done = await asyncio.to_thread(run_nereid, *arguments, **self.settings)
        if done.returncode:
            self.failures.append(f"nereid {' '.join(arguments)}: {done.returncode} {done.stderr}")

    def version_of(self, name: str) -> int:
        """Return the default version of an added model: each start adds the next one, because numbers are not given again."""
        added = description.load(Path(str(self.settings["model_repository"]), name))
        return added.default_version if added else 0

    async def change_by_http(self, features: frozenset[str]) -> None:
        await self.ask("POST /models/doors", content=self.network.read_bytes())
        await self.ask("PUT /models/doors/default-version", json={"version": self.version_of("doors")})
        await self.ask("POST /models/doors/load")
        answer = await self.ask("POST /predict/doors", content=SCENE)
        while "cache" in features and answer.is_success and answer.headers.get("X-Cache") != "hit":
            answer = await self.ask("POST /predict/doors", content=SCENE)
        await self.ask("POST /models/doors/unload")
        another = SCENE + bytes(1)  # which is not in the cache
        await self.ask("POST /predict/doors", failure=0 if "on demand" in features else 503, content=another)
        await self.ask("DELETE /models/doors")

    async def change_by_command(self) -> None:
        await self.run("add", str(self.network), "--name", "gates")
        await self.run("use", f"gates:{self.version_of('gates')}")
        await self.run("load", "gates")
        await self.ask("POST /predict/gates", content=SCENE)
        await self.run("unload", "gates")
        await self.run("remove", "gates")


@pytest.fixture
def common(own: Settings, own_triton: EmbeddedTriton, database: str, tmp_path: Path) -> dict[str, object]:
    assert own_triton.poll() is None
    (tmp_path / "routes.toml").write_text(ROUTE, encoding="utf-8")
    (tmp_path / "shapes.toml").write_text(CASCADE, encoding="utf-8")
    return {
        "workers": 1,
        "model": own.model,
        "model_repository": own.model_repository,
        "triton_home": own.triton_home,
        "database_url": database,
        "dialects": "none",
        "api_keys_file": write_keys(tmp_path, ("boss", "secret", "detect search ingest health admin")),
    }


@pytest.mark.parametrize("features", ROWS.values(), ids=ROWS)
async def test_gateway_is_used_and_changed(
    features: frozenset[str], common: dict[str, object], receiver: Receiver, tmp_path: Path
) -> None:
    settings = common | {key: value for name in features for key, value in SETTINGS[name].items()}
    if "routes" in features:
        settings["routes_file"] = tmp_path / "routes.toml"
    operator = Operator(settings, tmp_path)
    if "cascades" in features:
        await operator.run("add", str(tmp_path / "shapes.toml"))
    async with running_gateway("", tmp_path, **settings) as gateway, operator.client as client:
        client.base_url = gateway.url
        for line in ("GET /health", "GET /metrics", "GET /models"):
            await operator.ask(line)
        await operator.ask("POST /detect", content=SCENE)
        for name, path in PATHS.items():
            await operator.ask(f"POST {path}", failure=0 if name in features else 404, files={"image": SCENE})
        await operator.change_by_http(features)
        await operator.change_by_command()
    if "cascades" in features:
        await operator.run("remove", "shapes")
    assert not operator.failures, "\n".join([*operator.failures, (tmp_path / "gateway.log").read_text(encoding="utf-8")])
    assert ("POST /detect" in {span.name for span in receiver.spans}) == ("tracing" in features)
