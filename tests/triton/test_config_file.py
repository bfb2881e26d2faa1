"""Config files of models."""

from pathlib import Path

import pytest

from app.triton.config_file import ConfigFileError, read_config_file, unloadable_models


def test_a_config_is_read_as_triton_reports_it(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("is_embedded", "invalid"), [(True, ["broken", "own"]), (False, ["broken"])])
def test_models_that_no_triton_can_load_are_named(tmp_path: Path, *, is_embedded: bool, invalid: list[str]) -> None:
    files = {"sound/config.pbtxt": "", "broken/config.pbtxt": "input {", "own/configs/embedded.pbtxt": "input {"}
    networks = "sound/1/model.onnx", "exported/best.onnx", "version/1/model.onnx", ".add-unfinished/model.onnx", "file.onnx"
    for path, content in {**files, **dict.fromkeys((*networks, "own/config.pbtxt", "nothing/notes.txt"), "")}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content, encoding="utf-8")
    found = unloadable_models(tmp_path, is_embedded=is_embedded)

    states = dict.fromkeys(invalid, "invalid") | dict.fromkeys(("exported", "version"), "no_config")
    assert {name: one.state for name, one in found.items()} == states
    for name, (_, reason) in found.items():
        assert reason.startswith(f"{tmp_path}/{name}")
        assert (f"`nereid add {tmp_path}/{name}`" in reason) is (name == "exported")
        assert "\n" not in reason
    assert unloadable_models(tmp_path / "nowhere", is_embedded=is_embedded) == {}
