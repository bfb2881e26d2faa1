"""A separate embedded PostgreSQL for a measurement, with its own data."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from app import feature
from app.embedded.postgres.install import install
from app.embedded.postgres.server import EmbeddedPostgres
from app.settings.schema import Settings


@contextmanager
def embedded_postgres() -> Iterator[Settings]:
    """Run an embedded PostgreSQL with the settings of production until the block ends; yield the settings with it.

    Raises:
        CommandError: It cannot be installed, or does not start.
    """
    usual = feature.read_settings()
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
        try:
            server.start()
            yield settings
        finally:
            server.stop()
            with suppress(OSError):
                settings.database_folder.rmdir()  # nobody will look for this home's PostgreSQL again
