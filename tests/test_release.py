"""What `./just release` refuses, and the notes and checksums that it writes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

COMMIT = "git -c user.name=me -c user.email=me@example.com commit -qam"
FAULTS = {
    "HEAD has no tag v1.2.3": "git tag --delete v1.2.3",
    "there are changes that are not committed": "touch new",
    "CHANGELOG.md has no date of 1.2.3": f"sed -i 's/, 2026.*/, soon/' CHANGELOG.md; {COMMIT} b; git tag -f v1.2.3",
}


class Clone:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT / "deploy" / "release", folder / "deploy" / "release", ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in {
            ".gitignore": "__pycache__\n/dist/\n",
            "CHANGELOG.md": "## 1.2.3, 2026-11-30\n\nSee [me](docs/me.md).\n\n### Here\n\n## 1.2.2, 2026-11-29\n\nOld.\n",
            "pyproject.toml": '[project]\nversion = "1.2.3"\n',
        }.items():
            (folder / name).write_text(text, encoding="utf-8")
        self.run(f"git init -q; git add .; {COMMIT} a; git tag v1.2.3")

    def run(self, script: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["sh", "-c", script], cwd=self.folder, capture_output=True, text=True, check=False)

    def release(self, arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.run(f"{sys.executable} deploy/release/make.py {arguments}")


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


@pytest.mark.parametrize("reason", FAULTS)
def test_release_is_refused_where_a_dry_run_goes_on(clone: Clone, reason: str) -> None:
    clone.run(FAULTS[reason])
    refused = clone.release("notes")
    assert (refused.returncode, refused.stderr.startswith(reason)) == (1, True)
    assert not (clone.folder / "dist").exists()

    rehearsed = clone.release("notes --dry-run")
    assert (rehearsed.returncode, rehearsed.stderr.count("a dry run goes on")) == (0, 1)
    assert f"a dry run goes on; a release would not: {reason}" in rehearsed.stderr


def test_release_has_the_notes_of_its_version_and_checksums(clone: Clone) -> None:
    assert clone.release("notes --source https://example.com/nereid").returncode == 0
    notes = (clone.folder / "dist" / "notes.md").read_text(encoding="utf-8")
    assert notes == "See [me](https://example.com/nereid/blob/v1.2.3/docs/me.md).\n\n### Here\n"
    assert clone.run("cd dist && sha256sum --check SHA256SUMS").stdout == "notes.md: OK\n"

    assert clone.release("").stderr == "dist has other files, which would become part of the release; first: rm -r dist\n"
    assert "there is no part note; there are wheels, simd, binary, images, notes" in clone.release("note").stderr
