"""Names and values of parameters, and the errors for those that are not valid."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.parameters import Parameters, names, parse, split_classes, unknown_parameter
from app.api.task_parameters import BatchParameters, ClassifyParameters, DetectParameters
from app.errors import GatewayError, InvalidParameter, UnknownModel
from app.pipeline.call import ClassifyOptions, DetectOptions


def test_without_parameters_the_defaults_apply() -> None:
    assert parse([], DetectParameters) == DetectParameters(
        model=None, confidence=0.25, iou=None, agnostic=False, classes=None, max_detections=100, boxes="normalized"
    )


def test_every_parameter_is_read() -> None:
    pairs = [("model", "yolo11n"), ("confidence", "0.4"), ("classes", "cat"), ("max_detections", "7"), ("boxes", "coco")]
    pairs += [("iou", "0.5"), ("agnostic", "true")]

    assert parse(pairs, DetectParameters) == DetectParameters(
        model="yolo11n", confidence=0.4, iou=0.5, agnostic=True, classes="cat", max_detections=7, boxes="coco"
    )


def test_model_name_is_an_alias_of_model() -> None:
    """`model_name` is the parameter's older name."""
    assert parse([("model_name", "yolox_nano")], DetectParameters).model == "yolox_nano"


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
    assert getattr(parse([(name, text)], DetectParameters), name) == value


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
    with pytest.raises(InvalidParameter, match=f"^{name}: "):
        parse([(name, text)], DetectParameters)


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
    with pytest.raises(InvalidParameter) as caught:
        parse([(name, value)], DetectParameters)

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
    """Names that other detectors' APIs use are recognised as well."""
    with pytest.raises(
        InvalidParameter, match=f"^unknown parameter '{given}'; did you mean '{meant}'. supported parameters: model,"
    ):
        parse([(given, "1")], DetectParameters)


def test_each_kind_of_request_has_parameters_of_its_own() -> None:
    pairs = [("model", "tiny"), ("version", "2"), ("timeout_ms", "5")]
    assert parse(pairs, Parameters) == Parameters(model="tiny", version=2, timeout_ms=5)

    with pytest.raises(InvalidParameter, match=r"^unknown parameter 'iou'; supported parameters: model, version, timeout_ms$"):
        parse([("iou", "0.5")], Parameters)


@pytest.mark.parametrize("given", ["image", "images", "file"])
def test_an_image_is_no_parameter(given: str) -> None:
    """The error says where it belongs, instead of suggesting what has a similar name."""
    with pytest.raises(InvalidParameter, match=f"^unknown parameter '{given}'; the image belongs into the body, or its address"):
        parse([(given, "1")], DetectParameters)


@pytest.mark.parametrize("given", ["", "score", "x" * 64])
def test_an_unknown_parameter_is_quoted(given: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        parse([("confidence", "0.5"), (given, "1")], DetectParameters)

    assert (
        caught.value.detail == f"unknown parameter {given!r}; supported parameters: {', '.join(DetectParameters.__struct_fields__)}"
    )


def test_a_long_name_is_quoted_in_part() -> None:
    """The response does not repeat kilobytes of the request."""
    with pytest.raises(InvalidParameter, match=f"^unknown parameter '{'x' * 64}'; supported"):
        parse([("x" * 10_000, "1")], DetectParameters)


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
        parse(pairs, DetectParameters)


@pytest.mark.parametrize(
    "model", ["", " ", "a b", "a\0", "a\r\nb", "a\n", "../etc", "a/b", "a\\b", "modèle", "٣", "a%2e", "m" * 65, "m" * 4096]
)
def test_a_name_that_no_model_can_have_is_unknown(model: str) -> None:
    """It is rejected before Triton is asked, and is not repeated in the response."""
    with pytest.raises(UnknownModel, match=r"^a model's name has 1 to 64 letters, digits, '_', '.' or '-'$"):
        parse([("model", model)], DetectParameters)


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

    assert parse(pairs, DetectParameters).options == DetectOptions("tiny", 0.4, ["cat", "3"], 7, iou=0.5, agnostic=True, version=2)
    assert DetectParameters().options == DetectOptions(None, 0.25, None, 100)


@pytest.mark.parametrize("classes", ["", ",", " , ,, "])
def test_an_empty_list_of_classes_is_rejected(classes: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^classes: expected names or ids, separated by commas$"):
        parse([("classes", classes)], DetectParameters)


def test_the_names_include_the_aliases() -> None:
    assert set(names(DetectParameters)) == {*DetectParameters.__struct_fields__, "model_name"}
    assert "supported parameters: model, " in unknown_parameter("x", DetectParameters).detail


@given(st.lists(st.tuples(st.one_of(st.sampled_from(DetectParameters.__struct_fields__), st.text()), st.text()), max_size=4))
def test_any_text_gives_parameters_or_a_gateway_error(pairs: list[tuple[str, str]]) -> None:
    try:
        parameters = parse(pairs, DetectParameters)
    except GatewayError:
        return

    assert 0 <= parameters.confidence <= 1
    assert 1 <= parameters.max_detections <= 300


@pytest.mark.parametrize("name", ["classes", "model", "boxes"])
def test_very_long_text_is_rejected(name: str) -> None:
    with pytest.raises(InvalidParameter, match=f"^{name}: longer than 4096 characters$"):
        parse([(name, "x," * 2049)], DetectParameters)


def test_classification_has_parameters_of_its_own() -> None:
    """Those of detection are unknown to it, and the error lists the right ones."""
    assert parse([], ClassifyParameters).options == ClassifyOptions(None, 0.0, 5)
    assert parse([("model_name", "m"), ("top_k", "3"), ("confidence", "0.5")], ClassifyParameters).options == ClassifyOptions(
        "m", 0.5, 3
    )
    with pytest.raises(
        InvalidParameter,
        match=r"^unknown parameter 'classes'; supported parameters: model, version, timeout_ms, url, top_k, confidence, format$",
    ):
        parse([("classes", "cat")], ClassifyParameters)


@pytest.mark.parametrize("top_k", ["0", "1001", "-1", "1.5", "all", ""])
def test_a_top_k_out_of_range_is_rejected(top_k: str) -> None:
    with pytest.raises(InvalidParameter, match=r"^top_k: "):
        parse([("top_k", top_k)], ClassifyParameters)


def test_an_image_of_a_batch_has_no_address_in_the_query() -> None:
    for kind, text in ((BatchParameters, "into the body; supported"), (ClassifyParameters, "or its address into 'url'; supported")):
        with pytest.raises(InvalidParameter, match=text):
            parse([("image", "1")], kind)


def test_classes_have_one_format() -> None:
    """So that a program that asks for it needs not know the task."""
    assert parse([("format", "json")], ClassifyParameters).presentation.format == "json"
    with pytest.raises(InvalidParameter, match=r"^format: "):
        parse([("format", "image")], ClassifyParameters)
