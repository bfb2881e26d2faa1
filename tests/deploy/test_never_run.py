"""The list of what was never run: it names each shipped file that says so of itself."""

import re
from fnmatch import fnmatch

from tests.deploy.needs import DEPLOY
from tests.support import ROOT

_, _, LIST = (ROOT / "docs" / "how-to" / "scale.md").read_text(encoding="utf-8").partition("## What was never run")
LISTED = re.findall(r"`([\w./*@-]+)`", " ".join(re.findall(r"^\| (.+?) \|", LIST, re.MULTILINE)))
_SAYS_SO = re.compile(r"(;|, but) not run\b|did not run it")


def test_the_list_names_each_file_that_says_so() -> None:
    files = [path for path in DEPLOY.rglob("*.*") if path.suffix in {".yaml", ".yml", ".conf", ".service"}]
    found = [path.relative_to(DEPLOY) for path in files if _SAYS_SO.search(path.read_text(encoding="utf-8")[:1000])]

    assert found
    assert [str(path) for path in found if not any(fnmatch(str(path), pattern) for pattern in LISTED)] == []
