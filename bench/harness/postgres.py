"""A separate embedded PostgreSQL for a measurement, with its own data."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
import psutil

from app.embedded.postgres.install import install
from app.embedded.postgres.server import EmbeddedPostgres
from app.settings import environment
from app.settings.schema import Settings
from bench.harness.meters import family


class Postgres(NamedTuple):
    """A running embedded PostgreSQL."""

    settings: Settings
    process: psutil.Process
    """The parent of those that serve connections."""

    def memory(self) -> int:
        """Return the memory of all its processes, in bytes; what they share counts once."""
        total = 0
        for process in family(self.process):
            with suppress(psutil.NoSuchProcess):  # those that tidy up come and go
                total += process.memory_full_info().pss
        return total


@contextmanager
def embedded_postgres() -> Iterator[Postgres]:
    """Run an embedded PostgreSQL with the settings of production until the block ends.

    Raises:
        CommandError: It cannot be installed, or does not start.
    """
    usual = environment.load()
    installed = Path(usual.database_home).resolve()
    install(installed, EmbeddedPostgres.installed)
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        home = Path(folder)
        home.chmod(0o711)  # its user must be able to enter
        if os.geteuid():
            (home / "server").symlink_to(installed / "server")
        else:
            shutil.copytree(installed / "server", home / "server")
        settings = msgspec.structs.replace(usual, database_url="", database_home=folder)
        server = EmbeddedPostgres(settings)
        before = set(psutil.Process().children())
        try:
            server.start()
            (process,) = (one for one in set(psutil.Process().children()) - before if one.name() == "postgres")
            yield Postgres(settings, process)
        finally:
            server.stop()
            with suppress(OSError):
                settings.database_folder.rmdir()  # nobody will look for this home's PostgreSQL again
