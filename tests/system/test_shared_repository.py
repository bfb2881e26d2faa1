"""Models that are added to a repository which Tritons share are loaded by all of them, also by one that starts later."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import psutil
import pytest

from app.embedded import launch, server
from app.embedded.server import EmbeddedTriton
from app.errors import GatewayError
from app.settings.schema import PREFIX, Settings
from app.triton.blocking_client import BlockingClient
from bench.harness.processes import environment_of
from bench.harness.triton import Triton
from tests.fakes import models
from tests.faults.serving import serving
from tests.processes import wait_for
from tests.support import ROOT, triton_home
from tests.system.test_model_versions import Service


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.write(tmp_path / "all")
    shared = tmp_path / "models"
    shared.mkdir()
    (tmp_path / "all" / "six_columns").rename(shared / "six_columns")
    return shared


@pytest.fixture
def tritons(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Triton]]:
    """Two Tritons that read the repository itself, as those of other hosts do."""

    def command(settings: Settings, folder: Path) -> list[str]:
        return [argument.replace(str(folder / "models"), str(repository)) for argument in launch.command(settings, folder)]

    monkeypatch.setattr(server, "command", command)
    with ExitStack() as stack:
        made = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            home = triton_home(tmp_path / name)
            settings = Settings(triton_home=home, model_repository=str(repository), model="six_columns")
            triton = EmbeddedTriton(settings)
            stack.callback(triton.stop)
            triton.start()
            made.append(Triton(settings, psutil.Process(triton.pid), triton))
        yield made


def test_each_triton_loads_what_is_added(tmp_path: Path, repository: Path, tritons: list[Triton]) -> None:
    addresses = [triton.address for triton in tritons]
    given = {"triton_endpoints": ",".join(addresses), "triton_loads_models": "true", "model": "six_columns"}
    environment = {f"{PREFIX}{name.upper()}": value for name, value in given.items()}
    environment |= {**environment_of(ROOT), f"{PREFIX}MODEL_REPOSITORY": str(repository)}
    with serving(tritons[0], tmp_path, settings=given) as gateway:
        service = Service(gateway.url, tmp_path, repository, environment)
        assert "uses it when a Triton has loaded it" in service.add(1)
        for address in addresses:
            wait_for(partial(has, address, is_wanted=True))
        assert service.answer("doors") == (200, "1")
        tritons[0].server.stop()
        tritons[0].server.start()
        wait_for(partial(has, addresses[0], is_wanted=True))
        service.add(2)
        wait_for(lambda: service.answer("doors") == (200, "2"))
        service.run("remove", "doors")
        for address in addresses:
            wait_for(partial(has, address, is_wanted=False))


def has(address: str, *, is_wanted: bool) -> bool:
    """Return whether a Triton has the model, or has not, as is wanted."""
    try:
        return BlockingClient(address).is_ready("doors") is is_wanted
    except GatewayError:
        return not is_wanted
