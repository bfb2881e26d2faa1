"""Config files of models."""

from pathlib import Path

import pytest

from app.triton.config_file import ConfigFileError, read_config_file


def test_a_config_is_read_as_triton_reports_it(tmp_path: Path) -> None:
    """Names are those in the file; unknown fields are left out."""
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
    path = tmp_path / "config.pbtxt"
    path.write_bytes(content)
    with pytest.raises(ConfigFileError) as caught:
        read_config_file(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_a_config_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigFileError, match=r"config.pbtxt: No such file"):
        read_config_file(tmp_path / "config.pbtxt")
