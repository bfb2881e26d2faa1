"""Entry point of the one-file program: runs the command line, or a module of the program in a child process."""

import argparse
import os
import runpy
import shutil
import signal
import sys
import traceback

# The bootloader has set it for this process. Child processes of other programs have their own libraries.
os.environ.pop("LD_LIBRARY_PATH", None)
if (original := os.environ.pop("LD_LIBRARY_PATH_ORIG", None)) is not None:
    os.environ["LD_LIBRARY_PATH"] = original

import unpacked

from app.host import program
from app.host.processes import die_with_parent


def _run() -> int | str:
    if sys.argv[1:2] == ["bench"]:
        return _measure(sys.argv[2:])
    from app.entry import main  # noqa: PLC0415 - must not be imported when it is run as a module

    return main()


def _measure(arguments: list[str]) -> int:
    """Load a running server: quick, full, sustained, sweep, open. Other experiments need a checkout."""
    from bench.experiments import server_load  # noqa: PLC0415
    from bench.harness.errors import ContestantError  # noqa: PLC0415

    parser = argparse.ArgumentParser(prog="nereid bench", description="Measure a server that runs.")
    server_load.add_to(parser.add_subparsers(required=True, metavar="name"))
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return int(options.run(options))
    except ContestantError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _run_module(name: str) -> int:
    die_with_parent(os.getppid())
    del sys.argv[1:3]
    runpy.run_module(name, run_name="__main__", alter_sys=True)
    return 0


def _run_command() -> int | str:
    parent = os.getppid()
    die_with_parent(parent)
    with unpacked.kept(program.ROOT):
        unpacked.remove_abandoned(program.ROOT)
        try:
            return _run()
        finally:
            if os.getppid() != parent:  # the bootloader, which removes the folder, was killed
                shutil.rmtree(program.ROOT, ignore_errors=True)


if __name__ == "__main__":
    try:
        sys.exit(_run_module(sys.argv[2]) if sys.argv[1:2] == ["-m"] and sys.argv[2:] else _run_command())
    except Exception:  # noqa: BLE001 - as Python does; the bootloader would add its own lines
        traceback.print_exc()
        sys.exit(1)
