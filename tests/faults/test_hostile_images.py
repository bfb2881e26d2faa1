"""Images that are broken, crafted or misleading: none harms a worker, and each gets the answer that says what is wrong."""

from random import Random

import pytest

from tests.faults import corpus
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Case, ask_all, encode
from tests.faults.serving import Gateway, unharmed


@pytest.mark.system
async def test_every_mode_of_every_format_is_decoded_and_no_truncated_image(gateway: Gateway) -> None:
    """A file that was cut anywhere in its pixels is answered with 422, never with detections on grey."""
    images = corpus.valid_images()
    cut = [
        Case(f"{name} {twentieth}", encode(data[: len(data) * twentieth // 20]))
        for name, data in images.items()
        if "animated" not in name  # only its first frame counts
        for twentieth in range(1, 19)
    ]
    whole = await ask_all(gateway.url, [Case(name, encode(data)) for name, data in images.items()])
    answers = await ask_all(gateway.url, cut)

    assert {label: answer.body for label, answer in whole if answer.status != 200} == {}
    assert {label: answer.status for label, answer in answers if answer.status not in {415, 422}} == {}


async def test_thousands_of_broken_images_do_no_harm(gateway: Gateway) -> None:
    random = Random(4603)  # noqa: S311 - the same images in each run
    images = corpus.valid_images()
    cases = [Case(f"{name} cut to {len(cut)}", encode(cut)) for name, data in images.items() for cut in corpus.truncate(data)]
    for name, data in images.items():
        cases += [Case(f"{name} damaged {n}", encode(corpus.damage(data, random))) for n in range(40)]
    cases += [Case(f"invented {n}", encode(corpus.invent(random))) for n in range(300)]
    random.shuffle(cases)

    with unharmed(gateway, growth_mb=50):
        answers = await ask_all(gateway.url, cases)

    assert len(answers) == len(cases) > 3_000
    assert {answer.status for _, answer in answers} <= {200, 413, 415, 422}


async def test_bomb_is_rejected_by_its_header(gateway: Gateway, record_figure: RecordFigure) -> None:
    bombs = corpus.bombs()

    with unharmed(gateway, growth_mb=5):
        cases = [Case(name, encode(data)) for name, data in bombs.items() for _ in range(5)]
        answers = await ask_all(gateway.url, cases, clients=1)

    assert {(label, answer.status, answer.code) for label, answer in answers} == {(name, 413, "image_too_large") for name in bombs}
    fastest = {name: min(answer.seconds for label, answer in answers if label == name) for name in bombs}
    record_figure("bombs: slowest kind, fastest of 5 answers, ms", max(fastest.values()) * 1e3, 10)
