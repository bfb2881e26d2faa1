"""The checks at the end of each run of the tests, and of each module."""

import os
import re
import subprocess
import sys
from pathlib import Path

from app.settings.schema import Settings
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


def test_processes_and_files_left_behind_are_named() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVING], cwd=ROOT, capture_output=True, text=True, check=True)
    file, process, last = done.stdout.splitlines()

    name, pid, then = last.split()
    assert (process, file, then) == (f"process {pid}: {sys.executable} -c import signal; signal.pause()", f"file {name}", "[]")


def test_file_in_use_by_another_process_is_not_left_behind(tmp_path: Path) -> None:
    """Such as the folder of a bench that runs beside the tests, while a log in it is open."""
    done = subprocess.run([sys.executable, "-c", USED, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["[]", f"['file {tmp_path}']"]


SOCKETS = """
import sys
from app.embedded.folder import TritonFolder
from app.settings.schema import Settings
from tests import leftovers

run = leftovers.Run()
unused, claimed = folders = [TritonFolder(Settings(triton_home=f"{sys.argv[1]}/{name}")) for name in ("unused", "claimed")]
leftovers._named_files = lambda: {folder.path for folder in folders if folder.path.exists()}
unused.make()
claimed.claim()
print(run.leftovers(grace_seconds=0.1), unused.path.exists(), claimed.path.exists())
claimed.give_up()
print(run.leftovers(), claimed.path.exists())
run.remove_folder()
"""


def test_folders_of_sockets_are_removed_once_no_program_has_them(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SOCKETS, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)

    assert done.stdout.splitlines() == ["[] False True", "[] False"]


HOLDING = """
import os, threading, pytest
from app.embedded.folder import TritonFolder
from app.resilience.worker_table import WorkerTable
from app.settings.schema import Settings
from tests import leftovers

leftovers._GRACE_SECONDS = 0
folders = [TritonFolder(Settings(triton_home=os.path.join(os.path.dirname(__file__), name))) for name in ("session", "test")]

@pytest.fixture(scope="session")
def shared():
    folders[0].claim()
    yield
    for folder in folders:
        folder.give_up()
        folder.path.rmdir()

def test_one(shared):
    folders[1].claim()
    WorkerTable()
    threading.Thread(target=threading.Event().wait, name="check_0", daemon=True).start()

def test_another():
    WorkerTable().close()
"""


def test_module_that_holds_a_lock_memory_or_a_thread_fails(tmp_path: Path) -> None:
    (tmp_path / "test_holding.py").write_text(HOLDING, encoding="utf-8")
    options = ("-p", "tests.leftovers", "-p", "no:cacheprovider", f"--rootdir={tmp_path}")
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # it starts faster
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)

    folder = Settings(triton_home=str(tmp_path / "test")).triton_folder
    expected = rf"{folder} \(\d+\), /memfd:nereid-workers \(deleted\) \(\d+\), thread check_0 \(\d+\)$"
    assert re.search(rf"AssertionError: test_holding.py has left behind {expected}", done.stdout, re.MULTILINE), done.stdout
    assert "2 passed, 1 error" in done.stdout
