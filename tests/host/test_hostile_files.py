"""Work on files that may be hostile: it ends in a result or in one sentence, and of a zip only what is needed is unpacked."""

import ctypes
import faulthandler
import os
import socket
import stat
import zipfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest

from app.host import archive, sandbox
from app.host.program import CommandError


def hang() -> str:
    while True:
        pass


def crash() -> str:
    faulthandler.disable()
    return str(ctypes.string_at(0))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (hang, "takes more than 0.5 s"),
        (lambda: "x" * (1 << 33), "the check of the file needs more than 4 GiB"),
        (crash, "was ended by SIGSEGV: it crashes ONNX Runtime, or needs more than 4 GiB"),
        (lambda: os._exit(0), "was ended: it crashes"),
        (lambda: repr(socket.socket()), "Operation not permitted"),
        (Mock(side_effect=CommandError("no")), "^no$"),
    ],
)
def test_failure_in_the_sandbox_is_one_sentence(monkeypatch: pytest.MonkeyPatch, work: Callable[[], str], message: str) -> None:
    if work is hang:
        monkeypatch.setattr(sandbox, "_SECONDS", 0.5)
    with pytest.raises(CommandError, match=message):
        sandbox.run(work, str)


LINK, OTHER_LINK = zipfile.ZipInfo("b"), zipfile.ZipInfo("a.onnx")
LINK.external_attr = OTHER_LINK.external_attr = stat.S_IFLNK << 16


@pytest.mark.parametrize(
    ("members", "needed", "result"),
    [
        ({"in/a.onnx": "1", "in/b": "2", "b": "3", "in/c": "4", "__MACOSX/in/._a.onnx": "5"}, "b", "12"),
        ({"a.onnx": "1", "b": "2", "../c": "3", "/d": "4", "..": "5", "unneeded": 101 * "6"}, "b ../c /d .. missing", "12"),
        ({"a.onnx": "1", LINK: "/etc/passwd"}, "", "1"),
        ({"a.onnx": "1", LINK: "/etc/passwd"}, "b", "'b' in the zip is not a plain file"),
        ({OTHER_LINK: "/etc/passwd"}, "", "'a.onnx' in the zip is not a plain file"),
        ({"a.onnx": 101 * "1"}, "", "too large when it is unpacked"),
        ({"a.onnx": "1", "b": 50 * "2", "c": 50 * "3"}, "b c", "too large when it is unpacked"),
        ({"best.pt": "1"}, "", "contains 0 files [*].onnx, not one"),
        ({"a.onnx": "1", "b.onnx": "2"}, "", "contains 2 files [*].onnx, not one"),
    ],
)
def test_zip_gives_one_file_and_what_it_needs(
    tmp_path: Path, members: dict[str | zipfile.ZipInfo, str], needed: str, result: str
) -> None:
    with zipfile.ZipFile(path := tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as whole:
        for name, content in members.items():
            whole.writestr(name, content)
    (folder := tmp_path / "folder").mkdir()
    with nullcontext() if result.isdigit() else pytest.raises(CommandError, match=result):
        archive.unpack(path, folder, ".onnx", lambda _: needed.split(), 100)
        assert sorted(file.read_text() for file in folder.iterdir()) == [*result]
    assert {*tmp_path.iterdir()} == {path, folder}
