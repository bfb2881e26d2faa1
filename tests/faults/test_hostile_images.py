"""Images that are broken, crafted or misleading: none harms a worker, and each gets the answer that says what is wrong."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from time import sleep

import psutil
import pytest

from app.errors import InvalidImage
from app.imaging.apart import Decoders
from tests.faults import corpus
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Case, ask_all, encode
from tests.faults.serving import Gateway, unharmed
from tests.faults.test_failing_triton import code_of
from tests.imaging.samples import AVIF, HEIC, NOISE
from tests.imaging.samples import encode as encode_image

_SEED = 4603
_DAMAGED_PER_IMAGE = 160
_INVENTED = 1_000
_BROKEN_APART = 20_000


@pytest.mark.system
async def test_every_mode_of_every_format_is_decoded(gateway: Gateway) -> None:
    """Rows 27 and 31: an image in any mode that its format can store is answered with 200."""
    answers = await ask_all(gateway.url, [Case(name, encode(data)) for name, data in corpus.valid_images().items()])

    assert {label: answer.body for label, answer in answers if answer.status != 200} == {}


async def test_ten_thousand_broken_images_do_no_harm(gateway: Gateway) -> None:
    """Rows 27 and 28: whatever is done to a file, the answer says what is wrong with it, and the workers stay as they are."""
    random = Random(_SEED)  # noqa: S311 - the same images in each run
    images = corpus.valid_images()
    cases = [Case(f"{name} cut to {len(cut)}", encode(cut)) for name, data in images.items() for cut in corpus.truncate(data)]
    for name, data in images.items():
        cases += [Case(f"{name} damaged {n}", encode(corpus.damage(data, random))) for n in range(_DAMAGED_PER_IMAGE)]
    cases += [Case(f"invented {n}", encode(corpus.invent(random))) for n in range(_INVENTED)]
    random.shuffle(cases)

    with unharmed(gateway, growth_mb=50):
        answers = await ask_all(gateway.url, cases)

    assert len(answers) == len(cases) >= 10_000
    assert {answer.status for _, answer in answers} <= {200, 413, 415, 422}


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


def test_twenty_thousand_broken_files_do_no_harm_apart(record_figure: RecordFigure) -> None:
    random = Random(_SEED)  # noqa: S311 - the same files in each run
    decoders = Decoders()
    files = [(AVIF, "AVIF"), (HEIC, "HEIC"), (encode_image(NOISE, "AVIF"), "AVIF")]
    cases = [(corpus.damage(data, random), name) for data, name in (random.choice(files) for _ in range(_BROKEN_APART))]
    assert decoders.decode(*files[0]).shape == (16, 32, 3)
    program = max(psutil.Process().children(), key=psutil.Process.create_time)
    before = program.memory_info().rss
    results: Counter[str] = Counter()
    peak = 0

    def decode(case: tuple[bytes, str]) -> None:
        try:
            decoders.decode(*case)
            results["decoded"] += 1
        except InvalidImage:
            results["invalid"] += 1

    with ThreadPoolExecutor(4) as threads:
        jobs = [threads.submit(decode, case) for case in cases]
        while not all(job.done() for job in jobs[-4:]):
            for child in program.children():
                with suppress(psutil.Error):
                    peak = max(peak, child.memory_info().rss - before)
            sleep(0.01)
    for job in jobs:
        job.result()

    record_figure("memory of a process beyond that of the program, MiB", peak / 2**20)
    assert results.total() == _BROKEN_APART
    assert max(psutil.Process().children(), key=psutil.Process.create_time) == program
    assert program.memory_info().rss < before + (10 << 20)
    decoders.close()


async def test_a_bomb_is_rejected_by_its_header(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Row 26: an image of too many pixels is answered with 413 before anything of it is decoded."""
    bombs = corpus.bombs()

    with unharmed(gateway, growth_mb=5):
        answers = await ask_all(
            gateway.url, [Case(name, encode(data)) for name, data in bombs.items() for _ in range(5)], clients=1
        )

    assert {(label, answer.status, code_of(answer)) for label, answer in answers} == {
        (name, 413, "image_too_large") for name in bombs
    }
    fastest = {name: min(answer.seconds for label, answer in answers if label == name) for name in bombs}
    record_figure("bombs: slowest kind, fastest of 5 answers, ms", max(fastest.values()) * 1e3, 10)
