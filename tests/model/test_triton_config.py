"""The parameters in a model's Triton config, and what Ultralytics' exporter writes into it."""

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.model import triton_config
from app.model.triton_config import ModelConfig, ModelParameters

MALFORMED = [
    "not python",
    "{",
    "\0",
    "[1, 2]",
    "{[]: 1}",
    "{'names': ['cat', 'dog']}",
    "{'names': {0: 'cat', 2: 'dog'}}",
    "{'names': {'0': 'cat'}}",
    "{'names': {0: 'cat', 'x': 'dog'}}",
    "{'names': {0: 'cat', None: 'dog'}}",
    "{'names': 3, 'imgsz': {}}",
    "__import__('os').getcwd()",
    "(" * 300,
    "1+" * 5000 + "1",
    "-" * 100_000 + "1",
]


def hints(**parameters: str) -> ModelParameters:
    return msgspec.convert(parameters, ModelParameters, strict=False)


@pytest.mark.parametrize(
    ("parameters", "labels"),
    [
        ({"labels": "cat"}, ("cat",)),
        ({"labels": "cat,dog"}, ("cat", "dog")),
        ({"labels": " cat , traffic light "}, ("cat", "traffic light")),
        ({"labels": '["tights, or a jersey", " dog\\u0021"]'}, ("tights, or a jersey", "dog!")),
        ({"labels": "cat [tabby],dog"}, ("cat [tabby]", "dog")),
        ({"labels": "[]", "metadata": "{'names': {0: 'dog'}}"}, ("dog",)),
        ({"metadata": "{'names': {0: 'cat', 1: 'dog'}}"}, ("cat", "dog")),
        ({"metadata": "{'names': {1: 'dog', 0: 'cat'}}"}, ("cat", "dog")),
        ({"metadata": "{'names': {0: 7}}"}, ("7",)),
        ({"labels": "cat", "metadata": "{'names': {0: 'dog'}}"}, ("cat",)),
        ({"labels": "", "metadata": "{'names': {0: 'dog'}}"}, ("dog",)),
        ({"labels": ""}, ()),
        ({}, ()),
    ],
)
def test_class_names_are_found(parameters: dict[str, str], labels: tuple[str, ...]) -> None:
    """`labels` takes precedence over the exporter's metadata; without either there are no names."""
    assert hints(**parameters).class_names() == labels


@pytest.mark.parametrize("labels", ["[cat,dog]", '["cat"', '["cat", 7]', '[["cat"]]', "[" * 5000])
def test_labels_that_are_no_json_array_are_rejected(labels: str) -> None:
    """Split at commas, they would be wrong names."""
    with pytest.raises(msgspec.ValidationError, match="labels begin with"):
        hints(labels=labels)


@pytest.mark.parametrize(
    ("parameters", "side"),
    [
        ({}, None),
        ({"metadata": "{'imgsz': [320, 320]}"}, 320),
        ({"metadata": "{'imgsz': (320, 320)}"}, 320),
        ({"metadata": "{'imgsz': 416}"}, 416),
        ({"metadata": "{'imgsz': []}"}, None),
        ({"metadata": "{'imgsz': '320'}"}, None),
        ({"metadata": "{'imgsz': 0}"}, None),
        ({"metadata": "{'imgsz': -1}"}, None),
        ({"square": "512"}, 512),
        ({"square": "512", "metadata": "{'imgsz': [320, 320]}"}, 512),
    ],
)
def test_side_of_the_input_is_found(parameters: dict[str, str], side: int | None) -> None:
    """`square` takes precedence over the exporter's `imgsz`; an impossible size counts as none."""
    assert hints(**parameters).side() == side


@pytest.mark.parametrize("metadata", MALFORMED)
def test_malformed_metadata_is_ignored(metadata: str) -> None:
    """Metadata that the exporter did not write counts as none."""
    given = hints(metadata=metadata)

    assert (given.class_names(), given.side()) == ((), None)


@given(st.text("{}[]()'\",:0123456789 abnmesigz-+\\", max_size=40))
@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")
def test_no_metadata_raises(metadata: str) -> None:
    given = hints(metadata=metadata)

    assert isinstance(given.class_names(), tuple)
    assert given.side() is None or isinstance(given.side(), int)


def test_every_parameter_is_documented() -> None:
    lines = re.findall(r"^    (\w+(?:, \w+)*)  ", triton_config.__doc__ or "", re.MULTILINE)
    listed = {name for line in lines for name in line.split(", ")}

    assert listed == set(ModelParameters.__struct_fields__)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"name": "m"}, ModelConfig(name="m")),
        (
            {
                "name": "m",
                "max_batch_size": "8",
                "input": [{"name": "i", "data_type": "TYPE_FP32", "dims": ["3", "-1"], "format": "X"}],
            },
            ModelConfig(name="m", max_batch_size=8, input=[triton_config.TensorConfig("i", "TYPE_FP32", [3, -1])]),
        ),
        (
            {"name": "m", "parameters": {"iou": {"string_value": "0.5"}}, "instance_group": [{"kind": "KIND_GPU", "count": 2}]},
            ModelConfig(
                name="m",
                parameters={"iou": triton_config.ParameterValue("0.5")},
                instance_group=[triton_config.InstanceGroup("KIND_GPU", 2)],
            ),
        ),
    ],
    ids=["name only", "numbers as text", "more than is read"],
)
def test_config_is_read_from_tritons_json(config: dict[str, Any], expected: ModelConfig) -> None:
    """Missing parts have defaults, 64-bit numbers may be text, and unknown parts are ignored."""
    assert msgspec.convert(config, ModelConfig, strict=False) == expected
