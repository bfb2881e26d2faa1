"""`serve --search` and `search` as a user runs them: the database comes, goes and fails, and detection goes on."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import httpx
import psutil
import pytest

from app.embedded.postgres.server import EmbeddedPostgres
from app.settings.schema import Settings
from tests.postgres import database_home
from tests.processes import has_ended, wait_for, wait_until_gone
from tests.support import SCENE, free_port, triton_home

pytestmark = pytest.mark.system


@contextmanager
def running(settings: Settings, log: Path, *command: str, **variables: str) -> Iterator[str]:
    """Run a command, which must end in order, and return its URL."""
    port = str(free_port())
    named = ("model_repository", "triton_home", "database_home", "model")
    environ = {f"NEREID_{name.upper()}": getattr(settings, name) for name in named}
    environ |= {"NEREID_TIMEOUT_SECONDS": "20", "NEREID_WORKERS": "1", **variables}
    with log.open("wb") as output:
        started = [sys.executable, "-m", "app", *command, "--port", port]
        process = subprocess.Popen(started, env=os.environ | environ, stdout=output, stderr=subprocess.STDOUT)
    family = [psutil.Process(process.pid)]
    try:
        yield f"http://127.0.0.1:{port}"
        family += family[0].children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        wait_until_gone(family)
    finally:
        process.kill()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").status_code == 200
    except httpx.TransportError:
        return False


def detects(url: str) -> int:
    return httpx.post(f"{url}/detect", content=SCENE, timeout=30).status_code


def statistics(url: str) -> int:
    return httpx.get(f"{url}/query/stats", timeout=30).status_code


async def answers(url: str) -> bool:
    try:
        connection = await asyncpg.connect(url)
    except (OSError, asyncpg.PostgresError):
        return False
    await connection.close()
    return True


@pytest.fixture
def home(repository: Path, tmp_path: Path) -> Iterator[Settings]:
    """Settings of a Triton with one small model, and of a database, neither of which runs."""
    shutil.copytree(repository / "six_columns", tmp_path / "models" / "six_columns")
    (tmp_path / "triton").mkdir()
    with database_home() as folder:
        own = Settings(
            model_repository=str(tmp_path / "models"),
            triton_home=triton_home(tmp_path / "triton"),
            database_home=str(folder),
            model="six_columns",
        )
        prepared = EmbeddedPostgres(own)
        prepared.prepare()
        prepared.stop()
        yield own
        own.database_folder.rmdir()


async def wait_for_database(url: str) -> None:
    for _ in range(600):
        if await answers(url):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(url)


async def test_detection_goes_on_whatever_becomes_of_the_database(home: Settings, tmp_path: Path) -> None:
    """It is tried again until it can start, and started again after a kill. `search` runs beside, with the same Triton."""
    data, log, beside = Path(home.database_home, "data"), tmp_path / "log", tmp_path / "beside"
    (data / "PG_VERSION").write_text("17\n")
    with running(home, log, "serve", "--search") as url:
        wait_for(lambda: is_ready(url))
        assert detects(url) == 200
        assert "warning: PostgreSQL could not be started, and will be tried again: " in log.read_text()
        assert statistics(url) == 503
        (data / "PG_VERSION").write_text("18\n")
        await wait_for_database(home.search_database)
        wait_for(lambda: statistics(url) == 200)

        postmaster = psutil.Process(int((data / "postmaster.pid").read_text().partition("\n")[0]))
        postmaster.kill()
        assert detects(url) == 200
        wait_for(lambda: has_ended(postmaster))
        await wait_for_database(home.search_database)
        wait_for(lambda: statistics(url) == 200)

        with running(home, beside, "search", NEREID_DATABASE_URL=home.search_database) as other:
            wait_for(lambda: is_ready(other))
            assert detects(other) == 404
            assert "Triton is ready" not in beside.read_text()
    assert not await answers(home.search_database)
