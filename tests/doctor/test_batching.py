"""What is said of a model's config."""

from typing import Any

import pytest

from app.doctor import batching
from app.doctor.finding import Finding, Severity
from tests.doctor.setups import assert_useful

FILE = "models/m/config.pbtxt"
POLICY = {"default_timeout_microseconds": "600000000", "allow_timeout_override": True, "max_queue_size": 64}


def check(**config: Any) -> dict[str, Finding]:  # noqa: ANN401
    """Check a config, as Triton's JSON has it, and return the findings by their codes."""
    return {finding.code: finding for finding in batching.check(batching.read({"name": "m", **config}), FILE)}


def with_policy(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """Make a good batching config with other values in its policy."""
    return {"default_queue_policy": {**POLICY, **changes}}


@pytest.mark.parametrize("largest", [0, 1, 8])
def test_a_good_config(largest: int) -> None:
    found = check(max_batch_size=largest, dynamic_batching=with_policy())

    assert {finding.severity for finding in found.values()} == {Severity.OK}
    assert set(found) == {"batching", "queue_policy"}


ON_GPU, ON_CPU = [{"kind": "KIND_GPU", "gpus": [0]}], [{"kind": "KIND_CPU"}]


@pytest.mark.parametrize(
    ("config", "code", "says", "fix"),
    [
        ({"max_batch_size": 8}, "batching", ["no dynamic_batching", "8", "no end"], f"add to {FILE}:\ndynamic_b"),
        # Such a model may have dynamic batching only for the policy of its queue.
        *(
            ({"max_batch_size": n, "instance_group": ON_CPU}, "queue_policy", ["no max_queue_size"], f"add to {FILE}:\ndynamic_b")
            for n in (0, 1)
        ),
        # A GPU computes a batch in little more time than one image.
        (
            {"max_batch_size": 1, "instance_group": ON_GPU, "dynamic_batching": with_policy()},
            "batching",
            ["one image at a time", "GPU"],
            "max_batch_size: 64",
        ),
        *(
            ({"max_batch_size": 8, "dynamic_batching": batching_}, "queue_policy", ["without end"], f"in {FILE}:\n  default_queue")
            for batching_ in ({}, with_policy(max_queue_size=0))
        ),
        # Triton would compute answers that nobody waits for.
        *(
            ({"max_batch_size": 8, "dynamic_batching": with_policy(**changes)}, "queue_timeout", ["deadline"], fix)
            for changes, fix in (
                ({"timeout_action": "DELAY"}, "timeout_action: REJECT"),
                ({"allow_timeout_override": False}, "allow_timeout_override: true"),
                ({"default_timeout_microseconds": "0"}, "default_timeout_microseconds: 600000000"),
            )
        ),
    ],
)
def test_a_config_that_hurts(config: dict[str, Any], code: str, says: list[str], fix: str) -> None:
    found = check(**config)

    assert_useful(found.pop(code), Severity.WARNING, says=says, fix=fix)
    assert {finding.severity for finding in found.values()} <= {Severity.OK}


def test_preferred_batches_that_are_too_large() -> None:
    found = check(max_batch_size=8, dynamic_batching={"preferred_batch_size": [4, 16, 32], **with_policy()})

    assert_useful(found["preferred_batch_size"], Severity.FAILURE, says=["of 16, 32,", "of 8"], fix=f"from {FILE}")


@pytest.mark.parametrize("kind", ["ensemble_scheduling", "sequence_batching"])
def test_other_schedulers_are_not_judged(kind: str) -> None:
    assert check(max_batch_size=8, **{kind: {}}) == {}


@pytest.mark.parametrize(
    ("microseconds", "inference_ms", "is_bad"),
    [
        (0, None, False),
        (5000, None, False),
        (25000, None, True),
        (5000, 4.0, True),
        (5000, 20.0, False),
        (500, 0.1, False),
        (25000, 30.0, False),
    ],
)
def test_a_delay_hurts_if_it_is_longer_than_an_inference(microseconds: int, inference_ms: float | None, *, is_bad: bool) -> None:
    """Of an inference whose time is not known, ten milliseconds are assumed; below one, nobody notices."""
    model = batching.read({"name": "m", "dynamic_batching": {"max_queue_delay_microseconds": str(microseconds)}})
    finding = batching.check_delay(model, FILE, inference_ms)

    assert finding.severity is (Severity.WARNING if is_bad else Severity.OK)
    assert ("inference" in finding.message) is (is_bad and inference_ms is not None)
    if is_bad:
        assert_useful(finding, Severity.WARNING, says=[f"{microseconds / 1000:g} ms"], fix=f"set in {FILE}: max_queue_delay")


@pytest.mark.parametrize(
    ("count", "threads", "cores", "is_embedded", "says", "fix"),
    [
        (2, None, 2.0, True, None, ""),
        (1, None, 2.0, True, None, ""),
        (4, None, 2.0, True, "wait for each other", "count: 2 "),
        (2, None, 16.0, True, "idle", "count: 16 "),
        (1, "4", 2.0, True, "wait for each other", "count: 1 "),
        (2, "2", 0.5, True, "wait for each other", "count: 1 "),
        (1, None, 8.0, False, None, ""),
        (2, None, 8.0, False, "of 8 threads", "count: 1 "),
        (2, "0", 8.0, False, "of 8 threads", "count: 1 "),
        (4, "2", 8.0, False, None, ""),
        (2, "many", 2.0, True, None, ""),
    ],
)
def test_instances_use_the_cores(  # noqa: PLR0913 - a table
    *, count: int, threads: str | None, cores: float, is_embedded: bool, says: str | None, fix: str
) -> None:
    """Of the embedded Triton one thread each, of another all cores, unless the config tells."""
    parameters = {} if threads is None else {"intra_op_thread_count": {"string_value": threads}}
    group = {"kind": "KIND_CPU", "count": count}
    model = batching.read({"name": "m", "backend": "onnxruntime", "instance_group": [group], "parameters": parameters})
    (finding,) = batching.check_instances(model, FILE, cores, is_embedded=is_embedded)

    if says is None:
        assert finding.severity is Severity.OK
    else:
        assert_useful(finding, Severity.WARNING, says=[says], fix=fix)


@pytest.mark.parametrize(("backend", "kind"), [("python", "KIND_CPU"), ("onnxruntime", "KIND_GPU")])
def test_instances_elsewhere_are_not_judged(backend: str, kind: str) -> None:
    """Their number of threads is unknown or does not matter."""
    model = batching.read({"name": "m", "backend": backend, "instance_group": [{"kind": kind, "count": 64}]})

    assert list(batching.check_instances(model, FILE, 2.0, is_embedded=False)) == []
