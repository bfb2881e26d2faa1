"""What `./just release` refuses, and the notes and checksums that it writes."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import ROOT

Run = Callable[[str], "subprocess.CompletedProcess[str]"]

COMMIT = "git -c user.name=me -c user.email=me@example.com commit -qam"
FILES = {
    ".gitignore": "__pycache__\n/dist/\n",
    "CHANGELOG.md": "## 1.2.3, 2026-11-30\n\nSee [me](docs/me.md).\n\n### Here\n\n## 1.2.2, 2026-11-29\n\nOld.\n",
    "pyproject.toml": '[project]\nversion = "1.2.3"\n',
}
FAULTS = {
    "HEAD has no tag v1.2.3": "git tag --delete v1.2.3",
    "there are changes that are not committed": "touch new",
    "CHANGELOG.md has no date of 1.2.3": f"sed -i 's/, 2026.*/, soon/' CHANGELOG.md; {COMMIT} b; git tag -f v1.2.3",
}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a script, in which `release` stands for the program, in a clone whose HEAD is ready for a release."""
    shutil.copytree(ROOT / "deploy" / "release", tmp_path / "deploy" / "release", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    program = f'release() {{ {sys.executable} deploy/release/make.py "$@"; }}\n'

    def run(script: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["sh", "-c", program + script], cwd=tmp_path, capture_output=True, text=True, check=False)

    run(f"git init -q; git add .; {COMMIT} a; git tag v1.2.3")
    return run


@pytest.mark.parametrize("reason", FAULTS)
def test_release_is_refused_where_a_dry_run_goes_on(run: Run, reason: str) -> None:
    run(FAULTS[reason])
    refused, rehearsed = run("release notes && ls dist"), run("release notes --dry-run && ls dist")

    assert (refused.returncode, refused.stderr.startswith(reason)) == (1, True)
    assert (rehearsed.returncode, rehearsed.stdout) == (0, "SHA256SUMS\nnotes.md\n")
    assert rehearsed.stderr.startswith(f"a dry run goes on; a release would not: {reason}")


def test_release_has_the_notes_of_its_version_and_checksums(run: Run) -> None:
    done = run("release notes --source https://example.com/nereid && cd dist && cat notes.md && sha256sum --check SHA256SUMS")

    assert done.stdout == "See [me](https://example.com/nereid/blob/v1.2.3/docs/me.md).\n\n### Here\nnotes.md: OK\n"
    assert run("release").stderr == "dist has other files, which would become part of the release; first: rm -r dist\n"
    assert "there is no part note; there are wheels, simd, binary, images, notes" in run("release note").stderr
