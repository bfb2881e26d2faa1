"""Real PostgreSQL servers of both versions for the tests, and fresh databases in them."""

import asyncio
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path

import asyncpg

from app.embedded.postgres.install import install
from app.embedded.postgres.server import EmbeddedPostgres
from app.settings.schema import Settings
from tests.processes import require_program, share, wait_for
from tests.support import ROOT, free_port

FOLDERS = ("pginstall18", "pginstall")
TEMPLATE = "migrated"
_NUMBERS = count(1)


class Postgres16(EmbeddedPostgres):
    """The older version, which the wheel has, too."""

    version = "16"
    installed = "pginstall"
    locale = ("--locale=C.UTF-8",)


@contextmanager
def database_home() -> Iterator[Path]:
    """Make a home with the installed programs, which another user can enter, unlike a checkout; it is removed in the end."""
    installed = ROOT / ".postgres"
    install(installed, *FOLDERS)
    home = Path(tempfile.mkdtemp(prefix="postgres-"))
    home.chmod(0o711)
    if os.geteuid():
        (home / "server").symlink_to(installed / "server")
    else:
        shutil.copytree(installed / "server", home / "server", copy_function=_link)
    yield home
    shutil.rmtree(home)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


class Server:
    def __init__(self, settings: Settings, program: EmbeddedPostgres) -> None:
        self.settings, self.program = settings, program

    def url(self, database: str) -> str:
        return self.settings.search_database.replace("/nereid?", f"/{database}?")

    async def execute(self, command: str, database: str = "postgres") -> None:
        connection = await asyncpg.connect(self.url(database))
        try:
            await connection.execute(command)
        finally:
            await connection.close()

    async def make_template(self) -> None:
        await self.execute(f"CREATE DATABASE {TEMPLATE}")
        with suppress(ImportError):
            from app.search.postgres import migrations  # noqa: PLC0415 - asyncpg takes time to load

            await migrations.migrate(self.url(TEMPLATE))

    async def pretend(self, url: str, pgvector: str) -> None:
        await self.execute(f"UPDATE pg_extension SET extversion = '{pgvector}' WHERE extname = 'vector'", name_of(url))  # noqa: S608 - ours

    @asynccontextmanager
    async def fresh(self, template: str = TEMPLATE) -> AsyncIterator[str]:
        """Make a database for one test, by default empty and migrated; its URL is returned, and it is removed in the end."""
        name = f"test_{os.getpid()}_{next(_NUMBERS)}"
        await self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        yield self.url(name)
        await self.execute(f"DROP DATABASE {name} WITH (FORCE)")


class Pooled(Server):
    """The same server behind PgBouncer."""

    def __init__(self, server: Server, port: int) -> None:
        super().__init__(server.settings, server.program)
        self._port, self.execute = port, server.execute  # type: ignore[method-assign]

    def url(self, database: str) -> str:
        return f"postgresql://nereid@127.0.0.1:{self._port}/{database}"


@contextmanager
def pooled(server: Server, mode: str, folder: Path) -> Iterator[Server]:
    """Run PgBouncer as the server's user. As a pooler of transactions, it takes another connection for each, if there is one."""
    program, port, home = require_program("pgbouncer", "pgbouncer"), free_port(), server.settings.database_folder
    user = "" if os.geteuid() else f"user={home.owner()}\n"
    (file := folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={home} port=5432 user=nereid\n[pgbouncer]\nauth_type=any\npool_mode={mode}\n{user}"
        f"listen_addr=127.0.0.1\nlisten_port={port}\nunix_socket_dir=\nserver_round_robin=1\n"
    )
    with subprocess.Popen([program, "--quiet", file], stderr=subprocess.DEVNULL) as process:
        try:
            wait_for(lambda: is_open(port))
            yield Pooled(server, port)
        finally:
            process.terminate()


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return not client.connect_ex(("127.0.0.1", port))


def name_of(url: str) -> str:
    return url.partition("?")[0].rpartition("/")[2]


def shared_server(folder: Path, program: type[EmbeddedPostgres] = EmbeddedPostgres) -> Server:
    """Return the one server, without `fsync`, of all processes of a run, which know the folder."""
    settings = Settings(database_home=share(folder, partial(_serve, program)))
    return Server(settings, program(settings))


@contextmanager
def _serve(program: type[EmbeddedPostgres]) -> Iterator[str]:
    with database_home() as home:
        settings = Settings(database_home=str(home))
        server = program(settings, fsync="off", shared_buffers="64MB", maintenance_work_mem="64MB")
        try:
            server.start()
            with ThreadPoolExecutor(1) as thread:  # the event loop of this one is not running, but there
                thread.submit(asyncio.run, Server(settings, server).make_template()).result()
            yield str(home)
        finally:
            server.stop()
            settings.database_folder.rmdir()
