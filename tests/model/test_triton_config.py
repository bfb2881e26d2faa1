"""The parameters in a model's Triton config, and what Ultralytics' exporter writes into it."""

import re

import msgspec
import pytest

from app.model.triton_config import ModelParameters
from tests.support import ROOT


def hints(**parameters: str) -> ModelParameters:
    return msgspec.convert(parameters, ModelParameters, strict=False)


@pytest.mark.parametrize(
    ("parameters", "labels"),
    [
        ({"labels": " cat , traffic light "}, ("cat", "traffic light")),
        ({"labels": '["tights, or a jersey", " dog\\u0021"]'}, ("tights, or a jersey", "dog!")),
        ({"labels": "cat [tabby],dog"}, ("cat [tabby]", "dog")),
        ({"labels": "[]", "metadata": "{'names': {0: 'dog'}}"}, ("dog",)),
        ({"metadata": "{'names': {1: 'dog', 0: 'cat'}}"}, ("cat", "dog")),
        ({"metadata": "{'names': ['cat', 'dog']}"}, ("cat", "dog")),
        ({"metadata": "{'names': {0: 7}}"}, ("7",)),
        ({"labels": "cat", "metadata": "{'names': {0: 'dog'}}"}, ("cat",)),
        ({}, ()),
    ],
)
def test_class_names_are_found(parameters: dict[str, str], labels: tuple[str, ...]) -> None:
    """`labels` takes precedence over the exporter's metadata; without either there are no names."""
    assert hints(**parameters).class_names() == labels


@pytest.mark.parametrize(
    "metadata",
    [
        "not python",
        "\0",
        "[1, 2]",
        "{[]: 1}",
        "{'names': {0: 'cat', 2: 'dog'}}",
        "{'names': {0: 'cat', None: 'dog'}}",
        "{'names': 3, 'imgsz': {}}",
        "__import__('os').getcwd()",
        "(" * 300,
        "1+" * 5000 + "1",
        "-" * 100_000 + "1",
    ],
)
def test_malformed_metadata_leaves_the_defaults(metadata: str) -> None:
    assert (hints(metadata=metadata).class_names(), hints(metadata=metadata).input_size()) == ((), None)


@pytest.mark.parametrize("labels", ["[cat,dog]", '["cat"', '["cat", 7]', '[["cat"]]', "[" * 5000])
def test_labels_that_are_no_json_array_are_rejected(labels: str) -> None:
    """Split at commas, they would be wrong names."""
    with pytest.raises(msgspec.ValidationError, match="labels begin with"):
        hints(labels=labels)


def test_every_parameter_is_documented() -> None:
    page = (ROOT / "docs" / "how-to" / "model-config.md").read_text(encoding="utf-8")
    table = page.partition("| parameter | values | default |\n")[2].partition("\n\n")[0]
    listed = [name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.split("|")[1])]

    assert sorted(listed) == sorted(ModelParameters.__struct_encode_fields__)
