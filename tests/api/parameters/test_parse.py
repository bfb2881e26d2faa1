"""Names and values of parameters, and the errors for those that are not valid."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.parameters.parse import Pairs, Parameters, parse_parameters, split_classes
from app.api.parameters.tasks import BatchParameters, ClassifyParameters, DetectParameters
from app.errors import GatewayError, InvalidParameter, UnknownModel
from app.expected import expected_value
from app.pipeline.call import DetectOptions, TaskOptions


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("confidence", {"0": 0.0, "1": 1.0, "1e-3": 0.001}),
        ("max_detections", {"1": 1, "300": 300, "5.0": 5}),
        ("timeout_ms", {"1": 1, "600000": 600_000}),
        ("version", {"1": 1, "9223372036854775807": 2**63 - 1}),
        ("boxes", {"normalized": "normalized", "pixel": "pixel", "cxcywh": "cxcywh"}),
        ("iou", {"0": 0.0, "1": 1.0}),
        ("agnostic", {"true": True, "1": True, "False": False, "0": False}),
        ("classes", {"null": "null"}),
        ("model", {"null": "null", "A-b_c.9": "A-b_c.9", "m" * 64: "m" * 64}),
    ],
)
def test_values_within_their_range_are_accepted(name: str, values: dict[str, object]) -> None:
    assert {text: getattr(parse_parameters([(name, text)], DetectParameters), name) for text in values} == values


@pytest.mark.parametrize(
    ("kind", "name", "values", "expected"),
    [
        (
            DetectParameters,
            "confidence",
            ["-0.1", "1.0001", "nan", "NaN", "inf", "-Infinity", "1e400", "null", "", "0,5", " 0.5", "٣", "high"],
            "a number from 0 to 1",
        ),
        (
            DetectParameters,
            "max_detections",
            ["0", "301", "-1", "1.5", "nan", "ten", "9" * 4000],
            "a whole number from 1 to 300",
        ),
        (DetectParameters, "version", ["0", "-1", "9223372036854775808", "latest", ""], "a whole number from 1"),
        (DetectParameters, "iou", ["-0.1", "1.0001", "nan", "", "0,5"], "a number from 0 to 1"),
        (DetectParameters, "agnostic", ["", "yes", "2"], "true or false"),
        (DetectParameters, "boxes", ["yolo", "Pixel", "", "xyxy"], "one of 'coco', 'cxcywh', 'normalized', 'pixel'"),
        (DetectParameters, "format", ["xml"], "one of 'coco-results', 'image', 'image_and_json', 'json'"),
        (DetectParameters, "timeout_ms", ["1s", "0"], "a whole number from 1 to 600000"),
        (DetectParameters, "image_id", ["-1", "1.5", "x", str(2**53 + 1)], "a whole number from 0 to 9007199254740992"),
        (DetectParameters, "classes", ["", ",", " , ,, "], "names or ids, separated by commas"),
        (ClassifyParameters, "format", ["image"], "'json'"),
        (ClassifyParameters, "top_k", ["0", "1001", "-1", "1.5", "all", ""], "a whole number from 1 to 1000"),
    ],
)
def test_a_value_that_is_not_valid_says_what_is_expected(
    kind: type[Parameters], name: str, values: list[str], expected: str
) -> None:
    for value in values:
        with pytest.raises(InvalidParameter) as caught:
            parse_parameters([(name, value)], kind)
        assert caught.value.detail.startswith(f"{name}: expected {expected}"), value


def test_a_choice_of_another_system_is_ignored() -> None:
    """OpenProcessor tells its clients that they may send it."""
    assert parse_parameters([("shared_client", "false")], DetectParameters) == DetectParameters()


SUPPORTED = ", ".join(DetectParameters.__struct_fields__)


@pytest.mark.parametrize(
    ("kind", "names", "detail"),
    [
        *((DetectParameters, [name], f"unknown parameter {name!r}; supported parameters: {SUPPORTED}") for name in ("", "score")),
        (DetectParameters, ["x" * 10_000], f"unknown parameter '{'x' * 64}'; supported parameters: {SUPPORTED}"),
        *(
            (DetectParameters, [name], f"unknown parameter '{name}'; the image belongs into the body, or its address into 'url'; ")
            for name in ("image", "images", "file")
        ),
        (BatchParameters, ["image"], "unknown parameter 'image'; the image belongs into the body; supported"),
        (ClassifyParameters, ["image"], "unknown parameter 'image'; the image belongs into the body, or its address into 'url'; "),
        (DetectParameters, ["confidence", "confidence"], "confidence is given more than once"),
        (DetectParameters, ["model", "model_name"], "model is given more than once"),
        (DetectParameters, ["model_name", "boxes", "model"], "model is given more than once"),
    ],
)
def test_a_name_that_is_not_valid_is_told(kind: type[Parameters], names: list[str], detail: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse_parameters([(name, "coco" if name == "boxes" else "0.5") for name in names], kind)

    assert caught.value.detail.startswith(detail)


@pytest.mark.parametrize("name", ["classes", "model", "boxes", "max_detections"])
def test_very_long_text_is_rejected(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name}: longer than 4096 characters$"):
        parse_parameters([(name, "x," * 2049)], DetectParameters)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        *((given, "confidence") for given in ("confidance", "Confidence", "confidence ", "conf")),
        *(("class", "classes"), ("wanted_classes", "classes"), ("max_det", "max_detections"), ("iou_threshold", "iou")),
        *(("class_agnostic_nms", "agnostic"), ("box", "boxes"), ("modelname", "model_name"), ("timeout", "timeout_ms")),
    ],
)
def test_a_misspelt_parameter_suggests_the_right_one(given: str, meant: str) -> None:
    with pytest.raises(
        InvalidParameter, match=f"^unknown parameter '{given}'; did you mean '{meant}'. supported parameters: timeout_ms,"
    ):
        parse_parameters([(given, "1")], DetectParameters)


@pytest.mark.parametrize(
    "model", ["", " ", "a b", "a\0", "a\r\nb", "a\n", "../etc", "a/b", "a\\b", "modèle", "٣", "a%2e", "m" * 65, "m" * 4096]
)
def test_a_name_that_no_model_can_have_is_unknown(model: str) -> None:
    with pytest.raises(UnknownModel, match=r"^a model's name has 1 to 64 letters, digits, '_', '.' or '-'$"):
        parse_parameters([("model", model)], DetectParameters)


@pytest.mark.parametrize(
    ("classes", "wanted"),
    [
        (None, None),
        ("cat", ["cat"]),
        ("cat,dog", ["cat", "dog"]),
        (" traffic light , 3,", ["traffic light", "3"]),
    ],
)
def test_classes_are_separated_by_commas(classes: str | None, wanted: list[str] | None) -> None:
    assert split_classes(",") == split_classes("") == []
    assert split_classes(classes) == wanted
    assert DetectParameters(classes=classes).options.classes == wanted


@pytest.mark.parametrize(
    "pairs",
    [
        [("classes", ["fire, small", "3"])],
        [("classes", "fire, small"), ("classes", "3")],
        [("classes", ["fire, small"]), ("classes", "3")],
    ],
)
def test_classes_with_commas_are_repeated_or_in_a_list(pairs: Pairs) -> None:
    assert parse_parameters(pairs, DetectParameters).options.classes == ["fire, small", "3"]
    assert parse_parameters(pairs[:1], DetectParameters).options.classes is not None


def test_a_list_with_one_value_is_that_value() -> None:
    assert parse_parameters([("boxes", ["coco"])], DetectParameters).boxes == "coco"


def test_the_options_of_detection_are_those_of_the_parameters() -> None:
    pairs = [("model_name", "tiny"), ("confidence", "0.4"), ("classes", "cat, 3"), ("max_detections", "7"), ("boxes", "coco")]
    pairs += [("iou", "0.5"), ("agnostic", "true"), ("version", "2")]

    options = parse_parameters(pairs, DetectParameters).options

    assert options == DetectOptions("tiny", 0.4, ["cat", "3"], 7, iou=0.5, agnostic=True, version=2)
    assert DetectParameters().options == DetectOptions(None, 0.25, None, 100)


@given(st.lists(st.tuples(st.one_of(st.sampled_from(DetectParameters.__struct_fields__), st.text()), st.text()), max_size=4))
def test_any_text_gives_parameters_or_a_gateway_error(pairs: list[tuple[str, str]]) -> None:
    try:
        parameters = parse_parameters(pairs, DetectParameters)
    except GatewayError:
        return

    assert 0 <= parameters.confidence <= 1
    assert 1 <= parameters.max_detections <= 300


def test_classification_has_parameters_of_its_own() -> None:
    assert parse_parameters([], ClassifyParameters).options == TaskOptions("classification", None, 0.0, 5)
    given = parse_parameters([("model_name", "m"), ("top_k", "3"), ("confidence", "0.5"), ("format", "json")], ClassifyParameters)
    assert given.options == TaskOptions("classification", "m", 0.5, 3)
    supported = "timeout_ms, truncated, model, version, url, top_k, confidence, format"
    with pytest.raises(InvalidParameter, match=f"^unknown parameter 'classes'; supported parameters: {supported}$"):
        parse_parameters([("classes", "cat")], ClassifyParameters)


@pytest.mark.parametrize("kind", [BatchParameters, ClassifyParameters, DetectParameters])
def test_every_parameter_is_described(kind: type[Parameters]) -> None:
    words = re.compile(r"text|true or false|one of '[a-z_-]+'(, '[a-z_-]+')+|'[a-z]+'|a (whole )?number from \d+ to \d+")

    for name in kind.__struct_fields__:
        assert words.fullmatch(expected_value(kind, name)), name
