"""Names and values of parameters, and the errors for those that are not valid."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.parameters.parse import Parameters, expected_value, names, parse_parameters, split_classes, unknown_parameter
from app.api.parameters.tasks import BatchParameters, ClassifyParameters, DetectParameters
from app.errors import GatewayError, InvalidParameter, UnknownModel
from app.pipeline.call import ClassifyOptions, DetectOptions


def test_without_parameters_the_defaults_apply() -> None:
    """Everything has its documented default."""
    assert parse_parameters([], DetectParameters) == DetectParameters(
        model=None, confidence=0.25, iou=None, agnostic=False, classes=None, max_detections=100, boxes="normalized"
    )


def test_every_parameter_is_read() -> None:
    """Text is converted to the type of the parameter."""
    pairs = [("model", "yolo11n"), ("confidence", "0.4"), ("classes", "cat"), ("max_detections", "7"), ("boxes", "coco")]
    pairs += [("iou", "0.5"), ("agnostic", "true")]

    assert parse_parameters(pairs, DetectParameters) == DetectParameters(
        model="yolo11n", confidence=0.4, iou=0.5, agnostic=True, classes="cat", max_detections=7, boxes="coco"
    )


def test_model_name_is_an_alias_of_model() -> None:
    """The older name of the parameter still works."""
    assert parse_parameters([("model_name", "yolox_nano")], DetectParameters).model == "yolox_nano"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("confidence", "0", 0.0),
        ("confidence", "1", 1.0),
        ("confidence", "1e-3", 0.001),
        ("max_detections", "1", 1),
        ("max_detections", "300", 300),
        ("max_detections", "5.0", 5),
        ("timeout_ms", "1", 1),
        ("timeout_ms", "600000", 600_000),
        ("boxes", "normalized", "normalized"),
        ("version", "1", 1),
        ("version", "9223372036854775807", 2**63 - 1),
        ("boxes", "pixel", "pixel"),
        ("boxes", "cxcywh", "cxcywh"),
        ("iou", "0", 0.0),
        ("iou", "1", 1.0),
        ("agnostic", "true", True),
        ("agnostic", "1", True),
        ("agnostic", "False", False),
        ("agnostic", "0", False),
        ("classes", "null", "null"),
        ("model", "null", "null"),
        ("model", "A-b_c.9", "A-b_c.9"),
        ("model", "m" * 64, "m" * 64),
    ],
)
def test_values_within_their_range_are_accepted(name: str, text: str, value: object) -> None:
    """Limits are inclusive, and no word has a special meaning."""
    assert getattr(parse_parameters([(name, text)], DetectParameters), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("confidence", "-0.1"),
        ("confidence", "1.0001"),
        ("confidence", "nan"),
        ("confidence", "NaN"),
        ("confidence", "inf"),
        ("confidence", "-Infinity"),
        ("confidence", "1e400"),
        ("confidence", "null"),
        ("confidence", ""),
        ("confidence", "0,5"),
        ("confidence", " 0.5"),
        ("confidence", "٣"),
        ("max_detections", "0"),
        ("max_detections", "301"),
        ("max_detections", "-1"),
        ("max_detections", "1.5"),
        ("max_detections", "nan"),
        ("max_detections", "ten"),
        ("max_detections", "9" * 5000),
        ("version", "0"),
        ("version", "-1"),
        ("version", "9223372036854775808"),
        ("version", "latest"),
        ("version", ""),
        ("iou", "-0.1"),
        ("iou", "1.0001"),
        ("iou", "nan"),
        ("iou", ""),
        ("agnostic", ""),
        ("agnostic", "yes"),
        ("agnostic", "2"),
        ("boxes", "yolo"),
        ("boxes", "Pixel"),
        ("boxes", ""),
    ],
)
def test_values_out_of_range_are_rejected_by_name(name: str, text: str) -> None:
    """The message begins with the parameter that is not valid."""
    with pytest.raises(InvalidParameter, match=f"^{name}: "):
        parse_parameters([(name, text)], DetectParameters)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("agnostic", "yes", "true or false"),
        ("timeout_ms", "1s", "a whole number from 1 to 600000"),
        ("timeout_ms", "0", "a whole number from 1 to 600000"),
        ("confidence", "high", "a number from 0 to 1"),
        ("iou", "0,5", "a number from 0 to 1"),
        ("iou", "nan", "a number from 0 to 1"),
        ("boxes", "xyxy", "one of 'coco', 'cxcywh', 'normalized', 'pixel'"),
        ("format", "xml", "one of 'coco-results', 'image', 'image_and_json', 'json'"),
    ],
)
def test_a_value_that_is_not_valid_says_what_is_expected(name: str, value: str, expected: str) -> None:
    """In words, not in names of types; names of values are listed."""
    with pytest.raises(InvalidParameter) as caught:
        parse_parameters([(name, value)], DetectParameters)

    assert caught.value.detail == f"{name}: expected {expected}"


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("confidance", "confidence"),
        ("Confidence", "confidence"),
        ("confidence ", "confidence"),
        ("conf", "confidence"),
        ("class", "classes"),
        ("wanted_classes", "classes"),
        ("max_det", "max_detections"),
        ("iou_threshold", "iou"),
        ("class_agnostic_nms", "agnostic"),
        ("box", "boxes"),
        ("modelname", "model_name"),
        ("timeout", "timeout_ms"),
    ],
)
def test_a_misspelt_parameter_suggests_the_right_one(given: str, meant: str) -> None:
    """Also one that another detector's API has under a longer name."""
    with pytest.raises(
        InvalidParameter, match=f"^unknown parameter '{given}'; did you mean '{meant}'. supported parameters: model,"
    ):
        parse_parameters([(given, "1")], DetectParameters)


def test_each_kind_of_request_has_parameters_of_its_own() -> None:
    """What one has is unknown to another."""
    pairs = [("model", "tiny"), ("version", "2"), ("timeout_ms", "5")]
    assert parse_parameters(pairs, Parameters) == Parameters(model="tiny", version=2, timeout_ms=5)

    with pytest.raises(InvalidParameter, match=r"^unknown parameter 'iou'; supported parameters: model, version, timeout_ms$"):
        parse_parameters([("iou", "0.5")], Parameters)


@pytest.mark.parametrize("given", ["image", "images", "file"])
def test_an_image_is_no_parameter(given: str) -> None:
    """The error says where it belongs, instead of suggesting what has a similar name."""
    with pytest.raises(InvalidParameter, match=f"^unknown parameter '{given}'; the image belongs into the body, or its address"):
        parse_parameters([(given, "1")], DetectParameters)


@pytest.mark.parametrize("given", ["", "score", "x" * 64])
def test_an_unknown_parameter_is_quoted(given: str) -> None:
    """It is rejected with a list of those that are known."""
    with pytest.raises(InvalidParameter) as caught:
        parse_parameters([("confidence", "0.5"), (given, "1")], DetectParameters)

    assert (
        caught.value.detail == f"unknown parameter {given!r}; supported parameters: {', '.join(DetectParameters.__struct_fields__)}"
    )


def test_a_long_name_is_quoted_in_part() -> None:
    """The response does not repeat kilobytes of the request."""
    with pytest.raises(InvalidParameter, match=f"^unknown parameter '{'x' * 64}'; supported"):
        parse_parameters([("x" * 10_000, "1")], DetectParameters)


@pytest.mark.parametrize(
    ("pairs", "name"),
    [
        ([("confidence", "0.5"), ("confidence", "0.5")], "confidence"),
        ([("model", "a"), ("model_name", "a")], "model"),
        ([("model_name", "a"), ("boxes", "coco"), ("model", "b")], "model"),
    ],
)
def test_a_parameter_given_twice_is_rejected(pairs: list[tuple[str, str]], name: str) -> None:
    """Two values for one parameter contradict each other, also if one has the older name."""
    with pytest.raises(InvalidParameter, match=f"^{name} is given more than once$"):
        parse_parameters(pairs, DetectParameters)


@pytest.mark.parametrize(
    "model", ["", " ", "a b", "a\0", "a\r\nb", "a\n", "../etc", "a/b", "a\\b", "modèle", "٣", "a%2e", "m" * 65, "m" * 4096]
)
def test_a_name_that_no_model_can_have_is_unknown(model: str) -> None:
    """It is rejected before Triton is asked, and is not repeated in the response."""
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
    """Blanks around a name and empty names do not count; without the parameter there is no restriction."""
    assert split_classes(",") == split_classes("") == []
    assert split_classes(classes) == wanted
    assert DetectParameters(classes=classes).options.classes == wanted


def test_the_options_of_detection_are_those_of_the_parameters() -> None:
    """The pipeline gets all parameters but the format of the boxes, which only the response needs."""
    pairs = [("model", "tiny"), ("confidence", "0.4"), ("classes", "cat, 3"), ("max_detections", "7"), ("boxes", "coco")]
    pairs += [("iou", "0.5"), ("agnostic", "true"), ("version", "2")]

    options = parse_parameters(pairs, DetectParameters).options

    assert options == DetectOptions("tiny", 0.4, ["cat", "3"], 7, iou=0.5, agnostic=True, version=2)
    assert DetectParameters().options == DetectOptions(None, 0.25, None, 100)


@pytest.mark.parametrize("classes", ["", ",", " , ,, "])
def test_an_empty_list_of_classes_is_rejected(classes: str) -> None:
    """No object could be found with it."""
    with pytest.raises(InvalidParameter, match=r"^classes: expected names or ids, separated by commas$"):
        parse_parameters([("classes", classes)], DetectParameters)


def test_the_names_include_the_aliases() -> None:
    """The known names are those that are accepted, and no other."""
    assert set(names(DetectParameters)) == {*DetectParameters.__struct_fields__, "model_name"}
    assert "supported parameters: model, " in unknown_parameter("x", DetectParameters).detail


@given(st.lists(st.tuples(st.one_of(st.sampled_from(DetectParameters.__struct_fields__), st.text()), st.text()), max_size=4))
def test_any_text_gives_parameters_or_a_gateway_error(pairs: list[tuple[str, str]]) -> None:
    """Whatever the names and values."""
    try:
        parameters = parse_parameters(pairs, DetectParameters)
    except GatewayError:
        return

    assert 0 <= parameters.confidence <= 1
    assert 1 <= parameters.max_detections <= 300


@pytest.mark.parametrize("name", ["classes", "model", "boxes"])
def test_very_long_text_is_rejected(name: str) -> None:
    """Whatever the parameter, and before anything is done with it."""
    with pytest.raises(InvalidParameter, match=f"^{name}: longer than 4096 characters$"):
        parse_parameters([(name, "x," * 2049)], DetectParameters)


def test_classification_has_parameters_of_its_own() -> None:
    """Those of detection are unknown to it, and the error lists the right ones."""
    assert parse_parameters([], ClassifyParameters).options == ClassifyOptions(None, 0.0, 5)
    given = parse_parameters([("model_name", "m"), ("top_k", "3"), ("confidence", "0.5")], ClassifyParameters)
    assert given.options == ClassifyOptions("m", 0.5, 3)
    with pytest.raises(
        InvalidParameter,
        match=r"^unknown parameter 'classes'; supported parameters: model, version, timeout_ms, url, top_k, confidence, format$",
    ):
        parse_parameters([("classes", "cat")], ClassifyParameters)


@pytest.mark.parametrize("top_k", ["0", "1001", "-1", "1.5", "all", ""])
def test_a_top_k_out_of_range_is_rejected(top_k: str) -> None:
    """It is a whole number from 1 to 1000."""
    with pytest.raises(InvalidParameter, match=r"^top_k: "):
        parse_parameters([("top_k", top_k)], ClassifyParameters)


def test_an_image_of_a_batch_has_no_address_in_the_query() -> None:
    """The error names no parameter that the request does not know."""
    for kind, text in ((BatchParameters, "into the body; supported"), (ClassifyParameters, "or its address into 'url'; supported")):
        with pytest.raises(InvalidParameter, match=text):
            parse_parameters([("image", "1")], kind)


def test_classes_have_one_format() -> None:
    """So that a program that asks for it needs not know the task."""
    assert parse_parameters([("format", "json")], ClassifyParameters).presentation.format == "json"
    with pytest.raises(InvalidParameter, match=r"^format: "):
        parse_parameters([("format", "image")], ClassifyParameters)


@pytest.mark.parametrize("kind", [BatchParameters, ClassifyParameters, DetectParameters])
def test_every_parameter_is_described(kind: type[Parameters]) -> None:
    """Each number has a least and a greatest value."""
    words = re.compile(r"text|true or false|one of '[a-z_-]+'(, '[a-z_-]+')+|'[a-z]+'|a (whole )?number from \d+ to \d+")

    for name in kind.__struct_fields__:
        assert words.fullmatch(expected_value(kind, name)), name


def test_a_parameter_may_be_optional() -> None:
    """Its default is not what is expected."""
    assert expected_value(DetectParameters, "iou") == "a number from 0 to 1"
    assert expected_value(DetectParameters, "format").startswith("one of 'coco-results', ")
