"""The embedded PostgreSQL, for real: who may use it, and what a start that fails leaves behind."""

import os
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest

from app.embedded.folder import runs_elsewhere
from app.embedded.postgres.backup import backup
from app.embedded.postgres.server import EmbeddedPostgres
from app.host.program import CommandError
from app.settings.schema import Settings
from tests.postgres import database_home
from tests.processes import nothing_left_running  # noqa: F401 - a fixture


@pytest.fixture(scope="module")
def home() -> Iterator[Settings]:
    """Settings of a PostgreSQL that does not run, but has a database."""
    with database_home() as folder:
        settings = Settings(database_home=str(folder))
        server = EmbeddedPostgres(settings)
        server.prepare()
        server.stop()
        yield settings
        settings.database_folder.rmdir()


def postmaster(settings: Settings) -> psutil.Process:
    return psutil.Process(int(Path(settings.database_home, "data", "postmaster.pid").read_text().partition("\n")[0]))


async def test_the_database_is_private_durable_and_of_one_container(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another container may have another /dev/shm, and so not see the socket."""
    server = EmbeddedPostgres(home)
    server.start()
    assert server.poll() is None
    connection = await asyncpg.connect(home.search_database)
    wanted = {"fsync": "on", "data_checksums": "on", "server_encoding": "UTF8", "listen_addresses": "", "synchronous_commit": "on"}
    assert {name: await connection.fetchval(f"SHOW {name}") for name in wanted} == wanted
    await connection.close()
    assert home.database_folder.stat().st_mode & 0o777 == 0o700
    assert postmaster(home).uids().real == home.database_folder.stat().st_uid != 0
    assert not postmaster(home).net_connections("inet")
    with pytest.raises(CommandError, match=r"another process.* runs the PostgreSQL in .*NEREID_DATABASE_HOME"):
        EmbeddedPostgres(home).spawn()
    elsewhere = Path(home.database_home).parent / "socket"
    with monkeypatch.context() as patch:
        patch.setattr(Settings, "database_folder", elsewhere)
        with pytest.raises(CommandError, match="another process, perhaps in another container, uses"):
            EmbeddedPostgres(home).spawn()
    elsewhere.rmdir()
    server.stop()


def test_start_that_fails_leaves_folder_and_data_to_the_next(home: Settings) -> None:
    """After a restart of a container, the process id in the data may be that of another program."""
    with pytest.raises(CommandError, match="PostgreSQL did not start; its log is"):
        EmbeddedPostgres(home, port="none").start()
    stale = Path(home.database_home, "data", "postmaster.pid")
    stale.write_text(f"{os.getppid()}\n")
    backup(home, (kept := Path(home.database_home, "kept")))  # stops the server that it has started
    assert kept.stat().st_size
    assert not stale.exists()


def test_data_of_another_version_are_not_touched(home: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed restart keeps the folder: the supervisor tries again, and no other process takes its place meanwhile."""
    monkeypatch.setattr(EmbeddedPostgres, "version", "19")
    server = EmbeddedPostgres(home)
    for begin, is_claimed in ((server.prepare, False), (server.spawn, False), (server.spawn, True)):
        if is_claimed:
            server.folder.claim()
        with pytest.raises(CommandError, match="is of PostgreSQL 18, and this is 19: restore a backup"):
            begin()
        assert runs_elsewhere(EmbeddedPostgres(home).folder) is is_claimed
    server.stop()
