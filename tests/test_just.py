"""The script that sets the project up, as far as it gets without a network, and recipes without what they need."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT


def test_first_start_without_a_network_is_one_line(tmp_path: Path) -> None:
    """Pip reports it in many lines, the last of which says that there is no such package. The folder's name contains a space."""
    clone = tmp_path / "a clone"
    shutil.copytree(ROOT / "requirements", clone / "requirements")
    (clone / "clients" / "python").mkdir(parents=True)
    shutil.copy(ROOT / "clients" / "python" / "pyproject.toml", clone / "clients" / "python")
    for name in ("just", "justfile"):
        shutil.copy(ROOT / name, clone)
    # Instead of an environment, whose pip takes seconds to install, one with the pip of this Python.
    pip = f'exec "{sys.executable}" -m pip "$@"'
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\n[ \"$*\" = '-m venv --clear .venv' ] || exec '{sys.executable}' \"$@\"\n"
        f"mkdir -p .venv/bin; echo '{pip}' > .venv/bin/pip; chmod +x .venv/bin/pip\n",
        encoding="utf-8",
    )
    python.chmod(0o755)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PIP_")},
        "PYTHON": str(python),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:1/",
        "PIP_RETRIES": "1",
        "PIP_TARGET": str(tmp_path / "target"),
    }
    done = subprocess.run([clone / "just", "serve"], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.replace("\033[1m", "").replace("\033[0m", "").splitlines() == [
        "nereid: creating .venv",
        "nereid: the package index cannot be reached; is there a network, and is pip configured for it?",
    ]
    assert not (clone / ".venv" / "locked").exists()


def test_documentation_needs_graphviz(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    just = Path(sys.executable).with_name("just")
    done = subprocess.run([just, "docs"], env={"PATH": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "dot, which draws the diagrams, is not installed; on Debian: apt-get install graphviz\n"
