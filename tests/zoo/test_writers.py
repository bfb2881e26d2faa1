"""Several processes, also of several hosts, that change the models of one repository."""

import errno
import fcntl
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import onnx
import pytest

from app.host import program
from app.host.program import CommandError
from app.zoo.repository import Repository
from tests.processes import wait_for
from tests.zoo.exported import exported, head_tensors

SIZE = (256, 128)
IN_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]
"""Gives a process the id 1: the processes of two hosts may have the same."""
Flock = Callable[[int, int], None]


def nfs(flock: Flock, descriptor: int, operation: int) -> None:
    """Lock a file as NFS does it."""
    if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    flock(descriptor, operation)


def test_lock_is_possible_on_nfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: nfs(flock, descriptor, operation))
    with (
        Repository(tmp_path).writing(),
        pytest.raises(CommandError, match="another process changes the models"),
        Repository(tmp_path).writing(),
    ):
        pass


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", fail)
    message = rf"{tmp_path}/\.lock cannot be locked: {os.strerror(code)}; write to a local folder"
    with pytest.raises(CommandError, match=message), Repository(tmp_path).writing():
        pass


def test_closed_repository_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = PermissionError(errno.EACCES, "Permission denied", str(tmp_path))
    monkeypatch.setattr("os.listdir", Mock(side_effect=closed))
    with pytest.raises(CommandError, match=rf"^{tmp_path}: Permission denied$"):
        Repository(tmp_path).models()


@pytest.mark.system
@pytest.mark.skipif(
    subprocess.run([*IN_NAMESPACE, "true"], check=False, capture_output=True).returncode != 0,
    reason="making namespaces of processes needs root or CAP_SYS_ADMIN",
)
def test_writers_of_several_hosts_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    killed = adding(tmp_path, folder, "killed", is_complete=False)
    wait_for(lambda: any(folder.glob(".add-*/*")))
    others = [adding(tmp_path, folder, f"{index}") for index in range(3)]
    logs = [tmp_path / f"{index}.log" for index in range(3)]
    wait_for(lambda: all("waiting for another process" in log.read_text() for log in logs))
    assert killed.poll() is None
    killed.kill()
    killed.communicate()
    assert [process.wait() for process in others] == [0, 0, 0]
    assert adding(tmp_path, folder, "last").wait() == 0
    found = Repository(folder).load("doors")

    assert found is not None
    assert (list(found.versions), found.default_version, len({*found.versions.values()})) == (["1", "2", "3", "4"], 4, 4)
    for version in found.versions:
        onnx.checker.check_model(folder / "doors" / version / "model.onnx")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    texts = {"doors/model.toml", "doors/config.pbtxt", "doors/configs/embedded.pbtxt"}
    assert files == {".lock", *texts, *(f"doors/{version}/model.onnx" for version in found.versions)}


def adding(tmp_path: Path, folder: Path, name: str, *, is_complete: bool = True) -> "subprocess.Popen[bytes]":
    """Start to add a network as another host does, or to wait for its file, to which nothing comes; messages are in `name`.log."""
    names = {0: "door", 1: "window", 2: "gate"}
    network = exported(head_tensors("yolo", SIZE), SIZE, names=names, version=name).SerializeToString()
    command = [*IN_NAMESPACE, *program.command("app", "add"), "-", "--name", "doors", "--out", str(folder)]
    with (tmp_path / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=program.environment(), stdin=subprocess.PIPE, stderr=log)
    assert process.stdin is not None
    if is_complete:
        process.stdin.write(network)
        process.stdin.close()
    return process
