"""What is counted of the answers."""

import pytest

from bench.load.closed_loop import drive_closed_loop
from bench.load.outcome import Outcome, merge_histograms
from bench.load.tally import Tally
from tests.bench.support import CAT, DOG, SAMPLE, always, answer, serving


def tallied(*answers: tuple[int, float, str, bytes, bytes], seconds: float = 60) -> Outcome:
    """Count answers: number, start of the latency, status, body and Server-Timing."""
    tally = Tally([frozenset()], 1, seconds)
    tally.start()
    for one in answers:
        tally.answered(*one)
    return tally.outcome(0.0)


@pytest.mark.parametrize(
    "body", [DOG, b"{}", b"no JSON", b"", b'"\xff"'], ids=["other class", "no detections", "broken", "empty", "bytes"]
)
async def test_wrong_answers_are_not_correct(body: bytes) -> None:
    async with serving(always(answer(body))) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=1, seconds=30, requests=1)

    assert outcome.statuses == {"wrong": 1}
    assert outcome.correct == outcome.rate == outcome.histogram.total_count == 0
    assert outcome.failed == 1


@pytest.mark.parametrize(("label", "status"), [("cat", "200"), ("dog", "wrong")])
async def test_predictions_of_deepstack_are_read(label: str, status: str) -> None:
    body = b'{"success":true,"predictions":[{"label":"%b","confidence":0.9}]}' % label.encode()
    async with serving(always(answer(body))) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=1, seconds=30, requests=1)

    assert outcome.statuses == {status: 1}


async def test_every_seventeenth_of_the_later_answers_is_checked() -> None:
    async with serving(always(answer(DOG))) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE] * 3, clients=1, seconds=30, requests=35)

    assert outcome.statuses == {"200": 30, "wrong": 5}  # 0, 1, 2, 17, 34


async def test_statuses_are_counted_separately() -> None:
    responses = [answer(CAT), answer(b"{}", "503 Service Unavailable"), answer(b'{"code":"too_large"}', "413 Content Too Large")]

    async def reply(number: int, _request: bytes) -> bytes:
        return responses[number % 3]

    async with serving(reply) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=1, seconds=30, requests=9)

    assert outcome.statuses == {"200": 3, "413": 3, "503": 3}
    assert outcome.codes == {"413": ["too_large"]}
    assert outcome.failed == pytest.approx(2 / 3)


async def test_overhead_is_spent_neither_on_decoding_nor_in_triton() -> None:
    response = answer(CAT, "200 OK", "Server-Timing: decode;dur=0.2, infer;dur=0.1, post;dur=0.3, total;dur=0.6")
    async with serving(always(response)) as server:
        outcome = await drive_closed_loop(f"{server.url}/detect", [SAMPLE], clients=1, seconds=30, requests=1)

    assert outcome.overhead_p50 == pytest.approx(outcome.mean - 0.3, abs=0.01)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (b'{"name":"yolox_nano"}', "yolox_nano"),
        (b'{"name":3}', ""),
        (b'"yolox_nano"', ""),
        (b"null", ""),
        (b"[1]", ""),
    ],
)
def test_the_model_is_the_one_that_the_answers_name(model: bytes, name: str) -> None:
    """Other servers may put anything into `model`, and are correct all the same."""
    outcome = tallied((0, 0.0, "200", b'{"detections":[],"model":' + model + b"}", b""))

    assert outcome.statuses == {"200": 1}
    assert outcome.model == name


def test_other_parameters_of_server_timing_are_ignored() -> None:
    outcome = tallied((0, 0.0, "200", b'{"detections":[]}', b'db;dur=5;desc="x", cache'))

    assert outcome.stages == {"db": 5.0, "cache": 0.0}


def test_rejections_have_latencies_of_their_own() -> None:
    outcome = tallied(*((1, -1.0, status, b"", b"") for status in ("429", "503", "504", "200")))

    assert merge_histograms([outcome.rejections]).total_count == 2
    assert outcome.rejection_percentile(50) > 1000
    assert outcome.histogram.total_count == 1


def test_goodput_leaves_out_answers_after_the_last_request() -> None:
    late, in_time = (tallied((1, 0.0, "200", b"", b""), seconds=seconds) for seconds in (1e-9, 60))

    assert late.goodput == 0 < late.rate
    assert in_time.goodput == in_time.rate


def test_the_delay_of_a_schedule_is_that_of_all_but_one_in_a_hundred() -> None:
    tally = Tally([frozenset()], patience=1)
    assert tally.outcome(0.0).delay_p99 == 0
    for milliseconds in range(100):
        tally.due(milliseconds / 1e3)

    assert tally.outcome(0.0).delay_p99 == pytest.approx(99)
