"""The program `nereid`: the command line, and a way around it for the health check, which needs almost nothing of it."""

import os
import sys


def main() -> int | str:
    """Run one command and return its exit code, or what is wrong: `sys.exit` prints that, and exits with 1."""
    if sys.argv[1:] == ["healthcheck"]:
        from app import healthcheck  # noqa: PLC0415
        from app.settings import environment  # noqa: PLC0415
        from app.settings.schema import SettingsError  # noqa: PLC0415

        try:
            return healthcheck.failure(environment.load()) or 0
        except SettingsError as error:
            return str(error)
    from app.__main__ import main as command_line  # noqa: PLC0415 - takes most of a second

    try:
        code = command_line()
        sys.stdout.flush()
    except BrokenPipeError:  # `nereid settings | head`: whoever read it has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code
