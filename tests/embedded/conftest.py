"""An embedded Triton of a test's own: the real one, or a program that the test writes."""

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.embedded.install import install
from app.embedded.launch import shm_prefix
from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from tests.fakes import models
from tests.processes import children
from tests.support import ROOT, triton_home

SHM = Path("/dev/shm")  # noqa: S108 - where Triton puts its shared memory
MODEL = "six_columns"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A repository with one small model; the value is the model's folder."""
    model, parameters = models.models()[MODEL]
    models.save(tmp_path / "repository", MODEL, model, models.config(MODEL, model, parameters))
    return tmp_path / "repository" / MODEL


@pytest.fixture
def own(tmp_path: Path, tiny: Path) -> Iterator[Settings]:
    """Give the test the installed server under a home of its own; nothing may be left in /dev/shm."""
    install(ROOT / ".triton")
    (tmp_path / "home").mkdir()
    settings = Settings(model=MODEL, model_repository=str(tiny.parent), triton_home=triton_home(tmp_path / "home"))
    yield settings
    assert shared(settings) == []
    assert not settings.triton_folder.exists() or list(settings.triton_folder.iterdir()) == []


@pytest.fixture
def stand_in(own: Settings) -> Settings:
    """Replace the server's program by one that the test writes."""
    server = Path(own.triton_home, "server")
    server.unlink()
    for folder in ("bin", "backends"):
        (server / "pytriton" / "tritonserver" / folder).mkdir(parents=True)
    return own


def program_of(settings: Settings) -> Path:
    return Path(settings.triton_home, "server", "pytriton", "tritonserver", "bin", "tritonserver")


def script(settings: Settings, text: str, interpreter: str = "/bin/sh") -> None:
    program_of(settings).write_text(f"#!{interpreter}\n{text}\n", encoding="utf-8")
    program_of(settings).chmod(0o755)


# Answers like Triton; with a file in shared memory, and a process beside it.
IMITATION = """
import asyncio, os, signal, sys
plan = PLAN
def option(name):
    return next(argument for argument in sys.argv if name in argument).rpartition("=")[2]

print(plan["says"], flush=True)
with open("/dev/shm/" + option("shm-region-prefix-name") + "1", "w") as file:
    os.chmod(file.fileno(), 0o666)
if os.fork() == 0:
    signal.pause()
sys.path.insert(0, ROOT)
from tests.fakes.triton import FakeTriton, serving

async def main():
    fake = FakeTriton().find_nothing()
    fake.is_model_ready = plan["is_ready"]
    async with serving(fake, address=option("--grpc-address") + ":" + option("--grpc-port")):
        await asyncio.Event().wait()

asyncio.run(main())
"""


def imitate(stand_in: Settings, **otherwise: object) -> Settings:
    """Let the program behave like Triton, but for what a test wants otherwise."""
    plan = {"is_ready": True, "says": ""} | otherwise
    script(stand_in, IMITATION.replace("PLAN", repr(plan)).replace("ROOT", repr(str(ROOT))), f"{sys.executable} -I")
    return stand_in


@pytest.fixture
def imitation(stand_in: Settings) -> Settings:
    """Put a program that behaves like Triton into its place; it is there at once."""
    return imitate(stand_in)


@pytest.fixture
def server(own: Settings) -> Iterator[EmbeddedTriton]:
    server = EmbeddedTriton(own)
    yield server
    server.stop()


def shared(settings: Settings) -> list[Path]:
    return list(SHM.glob(f"{shm_prefix(settings)}*"))


def parts() -> set[psutil.Process]:
    return {child for child in children() if child.name().startswith("triton")}
