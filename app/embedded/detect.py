"""The command `detect`: the client's own command line, on a gateway that runs as long as it does."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from app.host import http, program
from app.host.processes import die_with_parent, end_group
from app.host.program import CommandError
from app.settings.environment import data_folders
from app.settings.schema import PREFIX, Settings
from app.telemetry.logging import say

_POLL_SECONDS = 0.1
_OK = 200


def run(settings: Settings, arguments: list[str]) -> int:
    """Run the client's command and return its exit code; raise CommandError if it or the gateway does not start."""
    try:
        from nereid_client import command  # noqa: PLC0415 - a distribution of its own
    except ModuleNotFoundError as error:
        raise CommandError("detect needs the client; install it: pip install 'nereid-client[progress,prepare]'") from error
    return command.run(command.parse(["detect", *arguments], "nereid", has_gateway=True), _gateway(settings))


@contextmanager
def _gateway(settings: Settings) -> Iterator[str]:
    say("starting a gateway; a first run may install Triton and download the model")
    # What another Triton lacks, the client learns from the first response.
    url = f"http://nereid/{'livez' if settings.triton_endpoints else 'readyz'}"
    with TemporaryDirectory(prefix="nereid-") as folder:
        socket, log = Path(folder) / "nereid.sock", Path(folder) / "log"
        # The current folder may have the pictures of somebody else, and with them programs: it is not used, except for a checkout.
        folders = {} if Path.cwd().samefile(program.ROOT) else data_folders(os.environ)
        changes = {"SOCKET": str(socket), "INSTANCES": "0", "API_KEYS_FILE": "", "DRAIN_DELAY_SECONDS": "0"}
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603 - this program
                program.command("app", "serve"),
                env=_variables(folders) | program.environment() | _variables(changes),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C stops the client; then this process stops the gateway
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - no threads here
            )
        try:
            while http.get_status(url, settings.timeout_seconds, socket) != _OK:
                if process.poll() is not None:
                    last_line = log.read_text(errors="replace").strip().rpartition("\n")[2]
                    raise CommandError(f"the gateway did not start: {last_line.removeprefix('nereid: ')}")
                time.sleep(_POLL_SECONDS)
            yield str(socket)
        finally:
            end_group(process, settings.drain_seconds)


def _variables(values: dict[str, str]) -> dict[str, str]:
    return {PREFIX + name.upper(): value for name, value in values.items()}
