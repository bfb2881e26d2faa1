"""Images that are broken, crafted or misleading: none harms a worker, and each gets the answer that says what is wrong."""

import json
from collections import Counter
from random import Random

import pytest

from bench.load.outcome import encode_latencies, merge_histograms
from tests.fakes import models
from tests.faults import corpus
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Answer, Case, ask, ask_all, encode
from tests.faults.serving import Gateway, unharmed
from tests.imaging.samples import RGB, png

_SEED = 4603
_DAMAGED_PER_IMAGE = 160
_INVENTED = 1_000


@pytest.mark.system
async def test_every_mode_of_every_format_is_decoded(gateway: Gateway) -> None:
    """Rows 27 and 31: an image in any mode that its format can store is answered with 200."""
    answers = await ask_all(gateway.url, [Case(name, encode(data)) for name, data in corpus.valid_images().items()])

    assert {label: answer.body for label, answer in answers if answer.status != 200} == {}


async def test_ten_thousand_broken_images_do_no_harm(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Rows 27 and 28: whatever is done to a file, the answer says what is wrong with it, and the workers stay as they are."""
    random = Random(_SEED)  # noqa: S311 - the same images in each run
    images = corpus.valid_images()
    cases = [Case(f"{name} cut to {len(cut)}", encode(cut)) for name, data in images.items() for cut in corpus.truncate(data)]
    for name, data in images.items():
        cases += [Case(f"{name} damaged {n}", encode(corpus.damage(data, random))) for n in range(_DAMAGED_PER_IMAGE)]
    cases += [Case(f"invented {n}", encode(corpus.invent(random))) for n in range(_INVENTED)]
    random.shuffle(cases)
    before = gateway.rss()

    with unharmed(gateway, growth_mb=50):
        answers = await ask_all(gateway.url, cases)

    record_figure("broken images sent", len(answers))
    record_figure("broken images: memory growth, MiB", (gateway.rss() - before) / 2**20, 50)
    latency = merge_histograms([encode_latencies(answer.seconds for _, answer in answers)])
    record_figure("broken images: p99 of the answers, ms", latency.get_value_at_percentile(99) / 1e3)
    statuses = Counter(answer.status for _, answer in answers)
    for status, number in sorted(statuses.items()):
        record_figure(f"broken images answered with {status}", number)
    assert len(answers) == len(cases) >= 10_000
    assert set(statuses) <= {200, 413, 415, 422}


@pytest.mark.system
async def test_a_truncated_image_is_rejected(gateway: Gateway) -> None:
    """Row 28: a file that was cut anywhere in its pixels is answered with 422, never with detections on grey."""
    cases = [
        Case(f"{name} {twentieth}", encode(data[: len(data) * twentieth // 20]))
        for name, data in corpus.valid_images().items()
        if "animated" not in name  # only its first frame counts
        for twentieth in range(1, 19)
    ]

    answers = await ask_all(gateway.url, cases)

    assert {label: answer.status for label, answer in answers if answer.status not in {415, 422}} == {}


async def test_a_bomb_is_rejected_by_its_header(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Row 26: an image of too many pixels is answered with 413 before anything of it is decoded."""
    bombs = corpus.bombs()
    before = gateway.rss()

    with unharmed(gateway, growth_mb=5):
        answers = await ask_all(
            gateway.url, [Case(name, encode(data)) for name, data in bombs.items() for _ in range(5)], clients=1
        )

    record_figure("bombs: memory growth, MiB", (gateway.rss() - before) / 2**20, 5)
    assert {(label, answer.status, _code(answer)) for label, answer in answers} == {
        (name, 413, "image_too_large") for name in bombs
    }
    fastest = {name: min(answer.seconds for label, answer in answers if label == name) for name in bombs}
    record_figure("bombs: slowest kind, fastest of 5 answers, ms", max(fastest.values()) * 1e3, 10)
    assert max(fastest.values()) < 0.010


@pytest.mark.system
@pytest.mark.parametrize(
    ("width", "height", "status", "code"),
    [
        (0, 10, 422, "invalid_image"),
        (10, 0, 422, "invalid_image"),
        (0, 0, 422, "invalid_image"),
        (1, 1, 200, ""),
        (1, 100, 200, ""),
        (1, 101, 422, "invalid_image_dimensions"),
        (101, 1, 422, "invalid_image_dimensions"),
        (1, 100_000, 422, "invalid_image_dimensions"),
        (100_000, 1, 422, "invalid_image_dimensions"),
        (16_385, 1000, 422, "invalid_image_dimensions"),
    ],
)
async def test_extreme_sides(gateway: Gateway, width: int, height: int, status: int, code: str) -> None:
    """Row 32: an image without pixels or of an absurd shape is rejected, and the smallest possible ones are not."""
    answer = await ask(gateway.url, encode(png(width, height, 8, RGB, bytes(width * height * 3))))

    assert answer.status == status, answer.body
    assert status == 200 or _code(answer) == code


@pytest.mark.system
async def test_a_polyglot_is_only_the_image_that_it_is(gateway: Gateway) -> None:
    """Row 29: an image that is an archive or a page as well is answered as the image alone, and none of the rest is repeated."""
    cases = [Case(name, encode(data, "/predict/six_columns")) for name, data in corpus.polyglots().items()]

    answers = await ask_all(gateway.url, cases)

    for label, answer in answers:
        assert answer.status == 200, (label, answer.body)
        assert [found["class_name"] for found in json.loads(answer.body)["detections"]] == ["red", "blue"], label
        assert b"canary" not in answer.body
        assert answer.headers["content-type"] == "application/json"


@pytest.mark.system
@pytest.mark.parametrize(
    "data",
    [
        b"%PDF-1.4\n" + models.scene("JPEG"),
        b"\0\0\0\x18ftypheic" + bytes(100),
        b"\0\0\0\x0cjP  \r\n\x87\n",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    ],
    ids=["PDF", "HEIC", "JPEG 2000", "SVG"],
)
async def test_other_formats_are_not_opened(gateway: Gateway, data: bytes) -> None:
    """Row 30: what does not begin as a supported image is answered with 415, whatever it contains later and is declared as."""
    for declared in ("image/jpeg", "application/octet-stream", "image/svg+xml"):
        answer = await ask(gateway.url, encode(data, Content_Type=declared))
        assert (answer.status, _code(answer)) == (415, "unsupported_format")


@pytest.mark.system
@pytest.mark.parametrize("declared", ["text/html", "video/mp4", "application/xml", "multipart/mixed; boundary=x"])
async def test_other_content_types_are_not_read(gateway: Gateway, declared: str) -> None:
    """Row 30: a body that is declared as something other than an image or a form is answered with 415."""
    answer = await ask(gateway.url, encode(models.scene("JPEG"), Content_Type=declared))

    assert (answer.status, _code(answer)) == (415, "unsupported_media_type")


@pytest.mark.system
async def test_colours_and_orientation_do_not_change_the_boxes(gateway: Gateway) -> None:
    """Row 31: one scene in every mode with colours and every orientation has the same boxes, IoU 0.99 or more."""
    path = "/predict/six_columns?boxes=pixel"
    reference = _boxes(await ask(gateway.url, encode(models.scene("BMP"), path)))

    answers = await ask_all(gateway.url, [Case(name, encode(data, path)) for name, data in corpus.coloured_scenes().items()])

    for label, answer in answers:
        boxes = _boxes(answer)
        assert boxes.keys() == reference.keys(), label
        assert all(_iou(boxes[name], reference[name]) >= 0.99 for name in boxes), label


def _code(answer: Answer) -> str:
    return str(json.loads(answer.body)["code"])


def _boxes(answer: Answer) -> dict[str, tuple[float, ...]]:
    assert answer.status == 200, answer.body
    return {
        found["class_name"]: tuple(found[side] for side in ("x1", "y1", "x2", "y2"))
        for found in json.loads(answer.body)["detections"]
    }


def _iou(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the intersection over union of two boxes, x1 y1 x2 y2."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    both = max(0, width) * max(0, height)
    return both / (sum((x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (one, other)) - both)
