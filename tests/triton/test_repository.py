"""What Triton says of the models in its repository, and their configs as they are written."""

from pathlib import Path

import grpc
import pytest

from app.errors import TritonUnavailable
from app.triton.client import TritonClient
from app.triton.repository import ConfigFileError, ModelState, read_config_file, read_states
from tests.fakes.triton import FakeTriton

Fake = tuple[FakeTriton, TritonClient]


async def test_the_state_of_a_model_comes_with_a_reason_of_one_line(fake_triton: Fake) -> None:
    """As far as Triton tells it."""
    fake, client = fake_triton
    fake.index = [("b", "1", "UNAVAILABLE", "no\tweights\nAt: line 1"), ("c", "", "", "")]

    assert await read_states(client) == {"b": ModelState("UNAVAILABLE", "no weights"), "c": ModelState("", "")}


@pytest.mark.parametrize("states", [["READY", "UNAVAILABLE"], ["UNAVAILABLE", "READY"]])
async def test_a_model_is_ready_if_one_of_its_versions_is(fake_triton: Fake, states: list[str]) -> None:
    """In whatever order Triton lists them."""
    fake, client = fake_triton
    fake.index = [("a", str(version), state, "" if state == "READY" else "unloaded") for version, state in enumerate(states)]

    assert await read_states(client) == {"a": ModelState("READY", "")}


async def test_a_triton_that_does_not_answer_is_unavailable(fake_triton: Fake) -> None:
    """Nothing is made up."""
    fake, client = fake_triton
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "Server is stopping"
    with pytest.raises(TritonUnavailable):
        await read_states(client)


def test_a_config_is_read_as_triton_reports_it(tmp_path: Path) -> None:
    """Names as in the file; fields that are newer than this program are left out."""
    path = tmp_path / "config.pbtxt"
    path.write_text(
        'name: "m"  # a comment\nmax_batch_size: 4\ninvented_later: 1\n'
        "dynamic_batching { max_queue_delay_microseconds: 7 default_queue_policy { max_queue_size: 2 } }\n"
        "instance_group [ { count: 2 kind: KIND_CPU } ]",
        encoding="utf-8",
    )

    assert read_config_file(path) == {
        "name": "m",
        "max_batch_size": 4,
        "dynamic_batching": {"max_queue_delay_microseconds": "7", "default_queue_policy": {"max_queue_size": 2}},
        "instance_group": [{"count": 2, "kind": "KIND_CPU"}],
    }


@pytest.mark.parametrize("content", [b"max_batch_size: many", b"input {", b"\xff"])
def test_a_config_that_is_not_valid_is_an_error_of_one_line(tmp_path: Path, content: bytes) -> None:
    """It names the file."""
    path = tmp_path / "config.pbtxt"
    path.write_bytes(content)
    with pytest.raises(ConfigFileError) as caught:
        read_config_file(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_config_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """It names the file and the reason."""
    with pytest.raises(ConfigFileError, match=r"config.pbtxt: No such file"):
        read_config_file(tmp_path / "config.pbtxt")
