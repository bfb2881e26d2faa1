"""`serve --search` and `search` as a user runs them: the database comes and goes, and detection goes on."""

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import asyncpg
import httpx
import psutil
import pytest

from app.embedded.postgres.server import EmbeddedPostgres
from app.settings.schema import Settings
from bench.harness import processes
from bench.harness.processes import variables
from tests.postgres import database_home
from tests.processes import PATIENCE_SECONDS, children, wait_for, wait_until_gone
from tests.support import SCENE, free_port, triton_home, until


@contextmanager
def running(settings: Settings, log: Path, *command: str, stop: int = signal.SIGTERM, **more: str) -> Iterator[str]:
    """Run a command until it is ready, which must end with its children, and in order unless it is killed; return its URL."""
    port = free_port()
    environment = {**variables(settings), "NEREID_PORT": str(port), "NEREID_TIMEOUT_SECONDS": "20", "NEREID_WORKERS": "1", **more}
    started = [sys.executable, "-m", "app", *command]
    with processes.running(started, environment, port, "/readyz", log, ready_seconds=PATIENCE_SECONDS) as server:
        yield server.url
        family = [server.process, *server.process.children(recursive=True)]
        server.process.send_signal(stop)
        assert server.process.wait() == (0 if stop == signal.SIGTERM else -stop)
        wait_until_gone(family)


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


async def test_detection_goes_on_while_the_database_cannot_be_started(home: Settings, tmp_path: Path) -> None:
    data, log, beside = Path(home.database_home, "data"), tmp_path / "log", tmp_path / "beside"
    (data / "PG_VERSION").write_text("17\n")
    with running(home, log, "serve", "--search") as url:
        assert detects(url) == 200
        assert "warning: PostgreSQL could not be started, and will be tried again: " in log.read_text()
        assert statistics(url) == 503
        (data / "PG_VERSION").write_text("18\n")
        await until(lambda: answers(home.search_database))
        wait_for(lambda: statistics(url) == 200)

        with running(home, beside, "search", NEREID_DATABASE_URL=home.search_database) as other:
            assert detects(other) == 404
            assert "Triton is ready" not in beside.read_text()
    assert not await answers(home.search_database)


def folders_of_search() -> set[Path]:
    """Return the folders of the sockets of search of gateways that this process has started, while these run."""
    folders = set()
    for child in children():
        with suppress(psutil.NoSuchProcess):  # it has just ended
            listening = map(Path, (each.laddr for each in child.net_connections("unix") if child.name() == "search"))
            folders |= {path.parent for path in listening if path.name == "search.sock"}
    return folders


async def test_folder_of_search_goes_with_its_gateway(home: Settings, tmp_path: Path) -> None:
    """That of a gateway that was killed goes when the next one starts, if not with another one's start."""
    with running(home, tmp_path / "killed", "serve", "--search", stop=signal.SIGKILL) as url:
        wait_for(lambda: statistics(url) == 200)
        (left,) = folders_of_search()
    with running(home, tmp_path / "log", "serve", "--search") as url:
        wait_for(lambda: statistics(url) == 200)
        assert not left.exists()
        (folder,) = folders_of_search()
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
