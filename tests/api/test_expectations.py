"""What parameters must be, in words."""

import re

import pytest

from app.api.expectations import expected_value
from app.api.parameters import Parameters
from app.api.task_parameters import BatchParameters, ClassifyParameters, DetectParameters


@pytest.mark.parametrize("kind", [BatchParameters, ClassifyParameters, DetectParameters])
def test_every_parameter_is_described(kind: type[Parameters]) -> None:
    words = re.compile(r"text|true or false|one of '[a-z_-]+'(, '[a-z_-]+')+|'[a-z]+'|a (whole )?number from \d+ to \d+")

    for name in kind.__struct_fields__:
        assert words.fullmatch(expected_value(kind, name)), name


def test_a_parameter_may_be_optional() -> None:
    assert expected_value(DetectParameters, "iou") == "a number from 0 to 1"
    assert expected_value(DetectParameters, "format").startswith("one of 'coco-results', ")
