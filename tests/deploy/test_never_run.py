"""The list of what was never run: it names each shipped file that says so of itself."""

import re
from fnmatch import fnmatch

import pytest

from tests.deploy.needs import DEPLOY
from tests.support import ROOT

_, _, LIST = (ROOT / "docs" / "how-to" / "scale.md").read_text(encoding="utf-8").partition("## What was never run")
LISTED = re.findall(r"`([\w./*-]+)`", " ".join(re.findall(r"^\| (.+?) \|", LIST, re.MULTILINE)))
FILES = sorted(path for path in DEPLOY.rglob("*.*") if path.suffix in {".yaml", ".yml", ".conf", ".service"})
_SAYS_SO = re.compile(r"\bnot run(,| by | in a )")


@pytest.mark.parametrize("file", [path.relative_to(DEPLOY).as_posix() for path in FILES])
def test_the_list_names_the_file_if_that_says_so(file: str) -> None:
    head = (DEPLOY / file).read_text(encoding="utf-8")[:600]

    assert not _SAYS_SO.search(head) or any(fnmatch(file, pattern) for pattern in LISTED)
