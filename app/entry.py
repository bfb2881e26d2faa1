"""The program `nereid`: the command line, with a fast path for the health check."""

import os
import sys


def main() -> int | str:
    """Run one command; return its exit code, or an error message, which `sys.exit` prints before it exits with 1."""
    if sys.argv[1:] == ["healthcheck"]:
        from app import feature, healthcheck  # noqa: PLC0415
        from app.settings.schema import SettingsError  # noqa: PLC0415

        try:
            return healthcheck.failure(feature.read_settings()) or 0
        except SettingsError as error:
            return str(error)
    from app.__main__ import main as command_line  # noqa: PLC0415 - takes most of a second

    try:
        code = command_line()
        sys.stdout.flush()
    except BrokenPipeError:  # `nereid settings | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
