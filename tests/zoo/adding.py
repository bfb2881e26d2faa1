"""Adding networks to a repository, which succeeds or changes nothing."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from app.host.program import CommandError
from app.model.spec import ModelSpec, from_triton_config
from app.triton.config_file import read_config_file
from app.triton.repository import LOCK, REMOVED, config_path
from app.zoo.add import Request, add
from app.zoo.inference import open_session, run
from app.zoo.recognize import read_options
from app.zoo.repository import Repository


@pytest.fixture(name="repository")
def new_repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def added(
    source: onnx.ModelProto | Path, repository: Repository, name: str | None = "doors", licence: str = "MIT", **options: str
) -> str:
    """Add a network, or what is in a file, and return its name."""
    if isinstance(source, onnx.ModelProto):
        onnx.save(source, path := repository.path.with_name("best.onnx"))
        source = path
    return add(Request(str(source), name, licence, None, read_options(options)), repository, lambda _: "")[0]


def spec_of(repository: Repository, name: str = "doors", version: str = "1", *, is_embedded: bool = False) -> ModelSpec:
    return from_triton_config(read_config_file(config_path(repository.path / name, is_embedded=is_embedded)), version)


def blank_outputs(repository: Repository, name: str = "doors", images: int = 1) -> dict[str, NDArray[np.generic]]:
    """Return what a detector with an input of `WIDE` pixels finds in blank images."""
    return run(open_session(repository.path / name / "1" / "model.onnx"), {"image": np.zeros((images, 128, 256, 3), np.uint8)})


def content(repository: Repository) -> dict[str, bytes]:
    files = [path for path in repository.path.rglob("*") if path.is_file() and path.name not in {LOCK, REMOVED}]
    return {str(path.relative_to(repository.path)): path.read_bytes() for path in files}


@contextmanager
def refused(repository: Repository, message: str) -> Iterator[pytest.ExceptionInfo[CommandError]]:
    """Demand an error of one line for the user, and that the repository is as it was."""
    before = content(repository)
    with pytest.raises(CommandError) as caught:
        yield caught
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)
    assert content(repository) == before
