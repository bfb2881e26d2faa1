"""Copy the database of search into a file, and back."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import copyfileobj
from subprocess import DEVNULL, PIPE, Popen
from tempfile import NamedTemporaryFile, TemporaryFile
from urllib.parse import unquote

from app.embedded.folder import runs_elsewhere
from app.embedded.postgres.install import install, programs
from app.embedded.postgres.server import EmbeddedPostgres, environment
from app.host.program import CommandError
from app.settings.schema import Settings

_PASSWORD = re.compile(r"(?<=//)([^:@?]*):([^?]*)(?=@)|(?<=[?&])([^&=]+)=([^&]*)&?")
"""In a URL, before the host, or among the parameters of the query; every user can read a command line."""
_SECRETS = {"password", "sslpassword", "oauth_client_secret"}
# A backup does not contain what only a superuser may be able to make.
_BEFORE_RESTORE = """
SET client_min_messages = warning;  -- the first line that is printed is the one that is shown
DO $$ BEGIN
    IF to_regclass('images') IS NOT NULL THEN
        IF EXISTS (SELECT FROM images) THEN
            RAISE EXCEPTION 'the database has images; restore into an empty one';
        END IF;
    END IF;
    IF to_regrole('nereid_search') IS NULL THEN
        CREATE ROLE nereid_search NOLOGIN;
    END IF;
    CREATE EXTENSION IF NOT EXISTS vector;
    IF (SELECT string_to_array(substring(extversion from '^[0-9.]+'), '.')::integer[] < '{0,8,3}'
        FROM pg_extension WHERE extname = 'vector') THEN
        RAISE EXCEPTION 'this pgvector can damage the indexes of a restore: install 0.8.4 or later, ALTER EXTENSION vector UPDATE';
    END IF;
END $$
"""
# The policies of the owner name the user whose the backup was; until they are made again, nobody sees any rows.
_AFTER_RESTORE = """
DO $$ DECLARE relation regclass; BEGIN
    IF NOT pg_has_role(current_user, 'nereid_search', 'SET') THEN
        EXECUTE format('GRANT nereid_search TO %I', current_user);
    END IF;
    FOR relation IN SELECT oid FROM pg_class WHERE relrowsecurity AND relnamespace = current_schema()::regnamespace LOOP
        EXECUTE format('CREATE POLICY owner ON %s TO CURRENT_USER USING (true)', relation);
    END LOOP;
END $$
"""


def backup(settings: Settings, file: Path) -> None:
    """Write all records into a file that only this user can read; the gateway may go on. Raise CommandError if it fails."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        raise CommandError(f"{file} cannot be made: {error.strerror}") from error
    try:
        with _database(settings):
            # With row-level security, an owner that is no superuser still reads all rows: a policy says so.
            options = ("--format=custom", "--no-owner", "--enable-row-security", "--exclude-extension=vector")
            _run(settings, "pg_dump", *options, f"--file={file}")
    except BaseException:
        file.unlink()
        raise


def restore(settings: Settings, file: Path) -> None:
    """Restore a backup in full or not at all, while no gateway runs. Raise CommandError if it fails, or there are records."""
    with _database(settings):
        listed = _run(settings, "pg_restore", "--list", str(file.resolve()))
        with NamedTemporaryFile("w") as chosen, TemporaryFile("w+") as errors:
            chosen.write(re.sub("^.* POLICY .* owner .*$", "", listed, flags=re.MULTILINE))
            chosen.flush()
            options = ("--file=-", "--clean", "--if-exists", "--no-owner", f"--use-list={chosen.name}", str(file.resolve()))
            psql = ("psql", "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", "--file=-")
            with (
                _command(settings, "pg_restore", *options) as (reading, variables),
                _command(settings, *psql) as (writing, target_variables),
                Popen([reading[0], *reading[2:]], env=variables, stdout=PIPE, stderr=errors) as source,  # noqa: S603 - into a script
                Popen(writing, env=target_variables, stdin=PIPE, stdout=DEVNULL, stderr=errors) as target,  # noqa: S603 - as above
            ):
                assert source.stdout  # noqa: S101 - a pipe, as is the other one
                assert target.stdin  # noqa: S101
                with suppress(BrokenPipeError), target.stdin as script:
                    script.write(f"BEGIN; {_BEFORE_RESTORE};\n".encode())
                    copyfileobj(source.stdout, script)
                    if not source.wait():  # otherwise, the transaction is not committed
                        script.write(f"RESET ALL; {_AFTER_RESTORE}; COMMIT;\n".encode())
                source.stdout.close()
            if source.returncode or target.returncode:
                errors.seek(0)
                raise CommandError(f"the restore failed: {errors.readline().strip()}")


@contextmanager
def _database(settings: Settings) -> Iterator[None]:
    # It runs the embedded PostgreSQL, unless it runs already; of another, it installs only the programs.
    server = EmbeddedPostgres(settings)
    try:
        if settings.database_url:
            install(Path(settings.database_home), server.installed)
        elif not runs_elsewhere(server.folder):
            server.start()
        yield
    finally:
        server.stop()


def _run(settings: Settings, program: str, *arguments: str) -> str:
    with _command(settings, program, *arguments) as (command, variables):
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)  # noqa: S603 - our own
    if done.returncode:
        raise CommandError(f"{program} failed: {done.stderr.strip().partition(chr(10))[0]}")
    return done.stdout


@contextmanager
def _command(settings: Settings, program: str, *arguments: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    variables, others = environment(), dict[str, str]()

    def keep(secret: re.Match[str]) -> str:
        if secret[3] is None:
            variables["PGPASSWORD"] = unquote(secret[2])
            return secret[1]
        if (name := unquote(secret[3])) not in _SECRETS:
            return secret[0]
        if name == "password":
            variables["PGPASSWORD"] = unquote(secret[4])
        else:
            others[name] = unquote(secret[4])
        return ""

    url = _PASSWORD.sub(keep, settings.search_database)
    path = programs(Path(settings.database_home), EmbeddedPostgres.installed) / program
    with NamedTemporaryFile("w") as file:  # which only this user can read
        if others:  # for which there are no variables
            file.writelines(["[nereid]\n", *(f"{name}={value}\n" for name, value in others.items())])
            file.flush()
            variables |= {"PGSERVICE": "nereid", "PGSERVICEFILE": file.name}
        yield [str(path), f"--dbname={url}", *arguments], variables
