"""Names and values of parameters, and the errors for those that are not valid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.parameters.parse import Pairs, Parameters, parse_parameters, split_classes
from app.api.parameters.tasks import BatchParameters, ClassifyParameters, DetectParameters
from app.errors import GatewayError, InvalidParameter
from app.pipeline.call import DetectOptions, TaskOptions


@pytest.mark.parametrize(
    ("kind", "name", "valid", "invalid", "expected"),
    [
        (DetectParameters, "confidence", {"0": 0.0, "1e-3": 0.001}, "-0.1 1.0001 nan 1e400 null 0,5", "a number from 0 to 1"),
        (DetectParameters, "max_detections", {"1": 1, "300": 300, "5.0": 5}, "0 301 1.5 ten ٣", "a whole number from 1 to 300"),
        (DetectParameters, "version", {"1": 1, str(2**63 - 1): 2**63 - 1}, f"0 {2**63} latest", "a whole number from 1"),
        (DetectParameters, "agnostic", {"true": True, "1": True, "False": False, "0": False}, "yes 2", "true or false"),
        (DetectParameters, "boxes", {"cxcywh": "cxcywh"}, "yolo Pixel", "one of 'coco', 'cxcywh', 'normalized', 'pixel'"),
        (DetectParameters, "classes", {"null": "null"}, ", ,,,", "names or ids, separated by commas"),
        (DetectParameters, "model", {"null": "null", "A-b_c.9": "A-b_c.9", "m" * 64: "m" * 64}, "", ""),
        (ClassifyParameters, "format", {"json": "json"}, "image", "'json'"),
    ],
)
def test_values_within_their_range_are_accepted_and_others_are_told_it(
    kind: type[Parameters], name: str, valid: dict[str, object], invalid: str, expected: str
) -> None:
    assert {text: getattr(parse_parameters([(name, text)], kind), name) for text in valid} == valid
    for value in [*invalid.split(), ""] if expected else []:
        with pytest.raises(InvalidParameter) as caught:
            parse_parameters([(name, value)], kind)
        assert caught.value.detail.startswith(f"{name}: expected {expected}"), value


SUPPORTED = ", ".join(DetectParameters.__struct_fields__)
BODY = "the image belongs into the body"


@pytest.mark.parametrize(
    ("kind", "names", "detail"),
    [
        (DetectParameters, ["x" * 10_000], f"unknown parameter '{'x' * 64}'; supported parameters: {SUPPORTED}"),
        (DetectParameters, ["images"], f"unknown parameter 'images'; {BODY}, or its address into 'url'; "),
        (BatchParameters, ["image"], f"unknown parameter 'image'; {BODY}; supported"),
        (DetectParameters, ["confidence", "confidence"], "confidence is given more than once"),
        (DetectParameters, ["model_name", "boxes", "model"], "model is given more than once"),
        *(
            (DetectParameters, [wrong], f"unknown parameter '{wrong}'; did you mean '{meant}'? supported parameters: timeout_ms,")
            for wrong, meant in (("Confidence ", "confidence"), ("conf", "confidence"), ("wanted_classes", "classes"))
        ),
        (ClassifyParameters, ["classes"], "unknown parameter 'classes'; supported parameters: timeout_ms, truncated, model,"),
    ],
)
def test_name_that_is_not_valid_is_told(kind: type[Parameters], names: list[str], detail: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse_parameters([(name, "coco" if name == "boxes" else "0.5") for name in names], kind)

    assert caught.value.detail.startswith(detail)


def test_very_long_text_is_rejected() -> None:
    assert parse_parameters([("classes", "x" * 4096)], DetectParameters).options.classes == ["x" * 4096]
    with pytest.raises(InvalidParameter, match=r"^classes: longer than 4096 characters$"):
        parse_parameters([("classes", "x" * 4097)], DetectParameters)


@pytest.mark.parametrize(
    ("pairs", "classes"),
    [
        ([("classes", " traffic light , 3,")], ["traffic light", "3"]),
        # Names with commas are repeated, or in a list.
        ([("classes", ["fire, small", "3"])], ["fire, small", "3"]),
        ([("classes", ["fire, small"]), ("classes", "3")], ["fire, small", "3"]),
        ([], None),
    ],
)
def test_classes_are_separated_by_commas_or_repeated(pairs: Pairs, classes: list[str] | None) -> None:
    assert split_classes("") == []
    assert parse_parameters(pairs, DetectParameters).options.classes == classes


def test_options_are_those_of_the_parameters() -> None:
    pairs: Pairs = [
        *(("model_name", "tiny"), ("confidence", "0.4"), ("classes", "cat, 3"), ("max_detections", "7"), ("boxes", ["coco"])),
        *(("iou", "0.5"), ("agnostic", "true"), ("version", "2")),
        ("shared_client", "false"),  # which OpenProcessor tells its clients that they may send
    ]
    wanted = parse_parameters(pairs, DetectParameters)
    assert wanted.options == DetectOptions("tiny", 0.4, ["cat", "3"], 7, iou=0.5, agnostic=True, version=2)
    assert wanted.boxes == "coco"
    assert parse_parameters([], DetectParameters).options == DetectOptions(None, 0.25, None, 100)

    assert parse_parameters([], ClassifyParameters).options == TaskOptions("classification", None, 0.0, 5)
    pairs = [("model_name", "m"), ("top_k", "3"), ("confidence", "0.5")]
    assert parse_parameters(pairs, ClassifyParameters).options == TaskOptions("classification", "m", 0.5, 3)


@given(st.lists(st.tuples(st.one_of(st.sampled_from(DetectParameters.__struct_fields__), st.text()), st.text()), max_size=4))
def test_any_text_gives_parameters_or_a_gateway_error(pairs: list[tuple[str, str]]) -> None:
    try:
        parameters = parse_parameters(pairs, DetectParameters)
    except GatewayError:
        return

    assert 0 <= parameters.confidence <= 1
    assert 1 <= parameters.max_detections <= 300
