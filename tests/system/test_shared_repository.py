"""Models that are added to a repository which Tritons share are loaded by all of them, also by one that starts later.

The Tritons run with the options of the shipped files that allow this.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from app.embedded import launch, server
from app.embedded.server import EmbeddedTriton
from app.errors import GatewayError
from app.settings.schema import TRITON_SOCKET, Settings
from app.triton.blocking_client import BlockingClient
from bench.harness.triton import Triton
from tests.deploy.needs import options_of
from tests.deploy.test_models_profile import PROFILES
from tests.fakes import models
from tests.faults.serving import serving
from tests.processes import wait_for
from tests.sockets import short_tmp_path  # noqa: F401 - a fixture
from tests.support import free_port, triton_home
from tests.system.test_model_versions import Service

MACHINE = {"model-config-name", "backend-directory", "backend-config", "allow-gpu-metrics", "exit-timeout-secs", "grpc-port"}
"""Options of the embedded Triton that run another one on this machine."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    models.write(tmp_path / "all")
    shared = tmp_path / "models"
    shared.mkdir()
    (tmp_path / "all" / "six_columns").rename(shared / "six_columns")
    return shared


@pytest.fixture
def tritons(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Triton]]:
    """A Triton for each profile, which reads the repository itself, as those of other hosts do."""

    def command(settings: Settings, folder: Path) -> list[str]:
        home = Path(settings.triton_home)
        profile, place = PROFILES[home.name], socket_of(home)
        program, *others = launch.command(settings, folder)
        (folder / place.name).symlink_to(place)  # where the embedded one would listen
        options = {name: value for name, value in options_of([program, *others]).items() if name in MACHINE} | profile.options
        del options["allow-client-shm"]  # which this Triton does not know
        ports = {"http-port": str(free_port()), "metrics-port": str(free_port())}
        options |= {"model-repository": str(repository), "grpc-address": f"unix:{place.with_name('triton')}"} | ports
        arguments = ["--disable-auto-complete-config", *(f"--{name}={value}" for name, value in options.items())]
        return ["/bin/sh", "-c", f'umask {profile.umask} && exec "$0" "$@"', program, *arguments]

    monkeypatch.setattr(server, "command", command)
    with ExitStack() as stack:
        made = []
        for name, profile in PROFILES.items():
            (tmp_path / name / "run").mkdir(parents=True)
            (tmp_path / name / "run").chmod(profile.mode)
            home = triton_home(tmp_path / name)
            settings = Settings(triton_home=home, model_repository=str(repository), model="six_columns")
            triton = EmbeddedTriton(settings)
            stack.callback(triton.stop)
            triton.start()
            made.append(Triton(settings, psutil.Process(triton.pid), triton))
        yield made


def socket_of(home: Path) -> Path:
    return home / "run" / TRITON_SOCKET


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user for the test")
@pytest.mark.usefixtures("tritons")
def test_no_other_user_reaches_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to load models, nor to map memory. In the folder, because another user may not reach that of the tests."""
    for name in PROFILES:
        monkeypatch.chdir(socket_of(tmp_path / name).parent)
        with socket.socket(socket.AF_UNIX) as connection:
            os.seteuid(65534)
            try:
                with pytest.raises(PermissionError):
                    connection.connect(TRITON_SOCKET)
            finally:
                os.seteuid(0)
            connection.connect(TRITON_SOCKET)


def test_each_triton_loads_what_is_added(tmp_path: Path, repository: Path, tritons: list[Triton]) -> None:
    addresses = [triton.address for triton in tritons]
    (loads_models,) = {profile.settings["NEREID_TRITON_LOADS_MODELS"] for profile in PROFILES.values()}
    given = {"triton_endpoints": ",".join(addresses), "triton_loads_models": loads_models, "model": "six_columns"}
    with serving(tritons[0], tmp_path, settings=given) as gateway:
        service = Service(gateway.url, tmp_path, repository, {**given, "model_repository": repository})
        assert "uses it when a Triton has loaded the change" in service.add(1)
        for address in addresses:
            wait_for(partial(has, address, is_wanted=True))
        assert service.answer("doors") == (200, "1")
        assert {triton["transport"] for triton in httpx.get(f"{gateway.url}/health").json()["tritons"]} == {"shm"}
        tritons[0].server.stop()
        tritons[0].server.start()
        wait_for(partial(has, addresses[0], is_wanted=True))
        service.add(2)
        wait_for(lambda: service.answer("doors") == (200, "2"))
        service.run("remove", "doors")
        for address in addresses:
            wait_for(partial(has, address, is_wanted=False))


def has(address: str, *, is_wanted: bool) -> bool:
    try:
        return BlockingClient(address).is_ready("doors") is is_wanted
    except GatewayError:
        return not is_wanted
