"""The check at the end of each run of the tests."""

import subprocess
import sys
from pathlib import Path

from tests.support import ROOT

LEAVING = """
import subprocess, sys, tempfile
from tests import leftovers

leftovers._named_files = set  # others run beside this one
run = leftovers.Run()
assert run.leftovers() == []
with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as process, tempfile.NamedTemporaryFile() as file:
    print(*run.leftovers(grace_seconds=0.1), sep="\\n")
    process.kill()
print(file.name, process.pid, run.leftovers())
run.remove_folder()
"""

USED = """
import subprocess, sys
from pathlib import Path
from tests import leftovers

run, folder = leftovers.Run(), Path(sys.argv[1])
leftovers._named_files = lambda: {folder}
with (folder / "log").open("w") as log:
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdout=log, env={})
print(run.leftovers(grace_seconds=0.1))
process.kill()
process.wait()
print(run.leftovers(grace_seconds=0.1))
run.remove_folder()
"""


def test_what_is_left_behind_is_named() -> None:
    """A process that still runs, and a temporary file; nothing once they are gone."""
    done = subprocess.run([sys.executable, "-c", LEAVING], cwd=ROOT, capture_output=True, text=True, check=True)
    file, process, last = done.stdout.splitlines()

    name, pid, then = last.split()
    assert (process, file, then) == (f"process {pid}: {sys.executable} -c import signal; signal.pause()", f"file {name}", "[]")


def test_what_another_process_uses_is_not_left_behind(tmp_path: Path) -> None:
    """Such as the folder of a bench that runs beside the tests, while a log in it is open."""
    done = subprocess.run([sys.executable, "-c", USED, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["[]", f"['file {tmp_path}']"]
