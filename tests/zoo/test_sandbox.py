"""Work on hostile files is contained: it ends in time, takes limited memory, reaches no network and leaves nothing."""

import ctypes
import faulthandler
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest

from app.host.program import CommandError
from app.zoo import sandbox
from app.zoo.repository import Repository
from tests.zoo.exported import exported
from tests.zoo.hostile import add_hostile, hostile, mutated


def hang() -> str:
    while True:
        pass


def crash() -> str:
    faulthandler.disable()
    return str(ctypes.string_at(0))


def refuse() -> str:
    raise CommandError("no")


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (hang, "takes more than 0.5 s"),
        (lambda: "x" * (1 << 33), "the check of the file needs more than 4 GiB"),
        (crash, "was ended by SIGSEGV: it crashes ONNX Runtime, or needs more than 4 GiB"),
        (lambda: os._exit(0), "was ended: it crashes"),
        (lambda: repr(socket.socket()), "Operation not permitted"),
        (refuse, "^no$"),
    ],
)
def test_failure_in_the_sandbox_is_one_sentence(monkeypatch: pytest.MonkeyPatch, work: Callable[[], str], message: str) -> None:
    if work is hang:
        monkeypatch.setattr(sandbox, "_SECONDS", 0.5)
    with pytest.raises(CommandError, match=message):
        sandbox.run(work, str)


def test_hostile_networks_are_added_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 2.0)
    reasons = {kind: add_hostile(content, Repository(tmp_path)) for kind, content in hostile(8)}
    assert reasons["endless"] == "the check of the file takes more than 2 s"
    assert all(reasons[kind] for kind in ("claiming", "expanding", "nested"))
    assert "does not run on blank images" in reasons["limited"]
    assert re.search("own:Own.* is not a registered|Cycle detected", reasons["foreign"])
    assert re.search("external TensorProto|should be stored in", reasons["outside"])


def test_weights_that_onnx_does_not_look_for_are_not_read(tmp_path: Path) -> None:
    """ONNX Runtime would read them."""
    network = exported({"output0": (7, 84)}, (64, 64))
    weight = onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="network.onnx")
    network.training_info.add().initialization.initializer.append(weight)
    assert "weights in other files" in add_hostile(network.SerializeToString(), Repository(tmp_path))


def test_damaged_networks_are_added_or_refused(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    whole = exported({"output0": (7, 84)}, (64, 64)).SerializeToString()
    assert add_hostile(whole, repository) == ""
    assert sum(bool(add_hostile(content, repository)) for content in mutated(whole, 10)) > 5  # some have another weight only
