"""What the one file runs: the command line, or a module of the program, which starts itself again."""

import argparse
import os
import runpy
import shutil
import signal
import sys
import traceback

signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C during the imports needs no traceback
# The bootloader has set it for this process. The programs that this one starts have libraries of their own.
os.environ.pop("LD_LIBRARY_PATH", None)
if (original := os.environ.pop("LD_LIBRARY_PATH_ORIG", None)) is not None:
    os.environ["LD_LIBRARY_PATH"] = original

from app.host import program  # noqa: E402
from app.host.processes import die_with_parent  # noqa: E402


def _run() -> int | str:
    if sys.argv[1:2] == ["bench"]:
        return _measure(sys.argv[2:])
    from app.entry import main  # noqa: PLC0415 - it must not be there yet when it is run as a module

    return main()


def _measure(arguments: list[str]) -> int:
    """Load a server that runs. The other experiments need a checkout."""
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


if __name__ == "__main__":
    parent = os.getppid()
    die_with_parent(parent)
    if sys.argv[1:2] == ["-m"]:
        del sys.argv[1]
        try:
            runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        except Exception:  # noqa: BLE001 - as Python does; the bootloader would add lines of its own
            traceback.print_exc()
            sys.exit(1)
        sys.exit()
    try:
        sys.exit(_run())
    finally:
        if os.getppid() != parent:  # the bootloader, which removes the folder, has been killed
            shutil.rmtree(program.ROOT, ignore_errors=True)
