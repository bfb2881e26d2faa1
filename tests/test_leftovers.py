"""The checks at the end of each run of the tests, and of each module."""

import os
import re
import subprocess
import sys
from pathlib import Path

from app.settings.schema import Settings
from tests.support import ROOT

LEAVING = """
import subprocess, sys
from pathlib import Path
from app.embedded.folder import TritonFolder
from app.settings.schema import Settings
from tests import leftovers

run, folder = leftovers.Run(), Path(sys.argv[1])
unused, claimed = folders = [TritonFolder(Settings(triton_home=f"{folder}/{name}")) for name in ("unused", "claimed")]
leftovers._named_files = lambda: {path for path in (folder, unused.path, claimed.path) if path.exists()}  # not those of others
unused.make()
claimed.claim()
for is_others in (True, False):
    with (folder / "log").open("w") as log:
        command, how = [sys.executable, "-c", "import signal; signal.pause()"], {"env": {}} if is_others else {}
        process = subprocess.Popen(command, stdout=log, **how)
    print(process.pid, run.leftovers(grace_seconds=0.1), unused.path.exists(), claimed.path.exists())
    process.kill()
    process.wait()
    claimed.give_up()
print(run.leftovers(grace_seconds=0.1))
run.remove_folder()
"""


def test_processes_and_files_left_behind_are_named_and_folders_of_sockets_removed(tmp_path: Path) -> None:
    """Not what others use: the folder of a bench that runs beside the tests, while a log in it is open, or that of a Triton."""
    done = subprocess.run([sys.executable, "-c", LEAVING, tmp_path], cwd=ROOT, capture_output=True, text=True, check=True)
    others, own, last = done.stdout.splitlines()

    assert others.split(" ", 1)[1] == "[] False True"
    pid, left = own.split(" ", 1)
    assert left == f"['process {pid}: {sys.executable} -c import signal; signal.pause()'] False False"
    assert last == f"['file {tmp_path}']"


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
