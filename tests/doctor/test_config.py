"""What is said of a model's config."""

from typing import Any

import pytest

from app.doctor import batching
from app.doctor.finding import Severity
from tests.doctor.setups import FAILURE, OK, WARNING, assert_finding

FILE = "models/m/config.pbtxt"
POLICY = {"default_timeout_microseconds": "600000000", "allow_timeout_override": True, "max_queue_size": 64}
ON_GPU, ON_CPU = [{"kind": "KIND_GPU", "gpus": [0]}], [{"kind": "KIND_CPU"}]


def with_policy(largest: int = 8, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """Make a good config with other values in the policy of its queue."""
    return {"max_batch_size": largest, "dynamic_batching": {"default_queue_policy": {**POLICY, **changes}}}


@pytest.mark.parametrize(
    ("config", "code", "says"),
    [
        *((with_policy(largest), "", []) for largest in (0, 8)),
        ({"max_batch_size": 8}, "batching", ["no dynamic_batching", "8", "no end", f"add to {FILE}:\ndynamic_b"]),
        # Such a model may have dynamic batching only for the policy of its queue.
        ({"max_batch_size": 1, "instance_group": ON_CPU}, "queue_policy", ["no max_queue_size", f"add to {FILE}:\ndynamic_b"]),
        # A GPU computes a batch in little more time than one image.
        ({**with_policy(1), "instance_group": ON_GPU}, "batching", ["one image at a time", "GPU", "max_batch_size: 64"]),
        (with_policy(max_queue_size=0), "queue_policy", ["without end", f"in {FILE}:\n  default_queue"]),
        # Triton would compute answers that nobody waits for.
        (with_policy(timeout_action="DELAY"), "queue_timeout", ["deadline", "timeout_action: REJECT"]),
        (with_policy(allow_timeout_override=False), "queue_timeout", ["deadline", "allow_timeout_override: true"]),
        (with_policy(default_timeout_microseconds="0"), "queue_timeout", ["deadline", "microseconds: 600000000"]),
        ({"max_batch_size": 8, "ensemble_scheduling": {}}, None, []),
        ({"max_batch_size": 8, "sequence_batching": {}}, None, []),
    ],
)
def test_queue_and_batches(config: dict[str, Any], code: str | None, says: list[str]) -> None:
    """Other schedulers are not judged."""
    found = {finding.code: finding for finding in batching.check(batching.read({"name": "m", **config}), FILE)}
    if code:
        assert_finding(found.pop(code), WARNING, *says)
    assert {finding.severity for finding in found.values()} <= {OK}
    assert (found == {}) == (code is None or (code == "batching" and "dynamic_batching" not in config))


def test_preferred_batches_that_are_too_large() -> None:
    config = {"name": "m", "max_batch_size": 8, "dynamic_batching": {"preferred_batch_size": [4, 8, 16, 32]}}
    finding = next(iter(batching.check(batching.read(config), FILE)))

    assert finding.code == "preferred_batch_size"
    assert_finding(finding, FAILURE, "of 16, 32,", "of 8", f"from {FILE}")


@pytest.mark.parametrize(
    ("microseconds", "inference_ms", "severity"),
    [
        (5000, None, OK),
        (10000, None, WARNING),
        (5000, 4.0, WARNING),
        (25000, 30.0, OK),
        (500, 0.1, OK),
        (1000, 0.1, WARNING),
    ],
)
def test_delay_hurts_if_it_is_as_long_as_an_inference(microseconds: int, inference_ms: float | None, severity: Severity) -> None:
    """Of an inference whose time is not known, ten milliseconds are assumed; below one, nobody notices."""
    model = batching.read({"name": "m", "dynamic_batching": {"max_queue_delay_microseconds": str(microseconds)}})
    finding = batching.check_delay(model, FILE, inference_ms)

    assert_finding(finding, severity, f"{microseconds / 1000:g} ms", "" if severity is OK else f"set in {FILE}: max_queue_delay")
    assert ("for its inference" in finding.message) is (severity is WARNING and inference_ms is not None)


@pytest.mark.parametrize(
    ("count", "threads", "cores", "is_embedded", "says"),
    [
        (2, None, 2.0, True, []),
        (1, None, 2.0, True, []),
        (4, None, 2.0, True, ["wait for each other", "count: 2 "]),
        (2, None, 16.0, True, ["idle", "count: 16 "]),
        (2, "2", 0.5, True, ["wait for each other", "count: 1 "]),
        (1, None, 8.0, False, []),
        (2, None, 8.0, False, ["of 8 threads", "count: 1 "]),
        (2, "0", 8.0, False, ["of 8 threads", "count: 1 "]),
        (4, "2", 8.0, False, []),
        (2, "many", 2.0, True, []),
    ],
)
def test_instances_use_the_cores(*, count: int, threads: str | None, cores: float, is_embedded: bool, says: list[str]) -> None:
    """Of the embedded Triton one thread each, of another all cores, unless the config tells."""
    parameters = {} if threads is None else {"intra_op_thread_count": {"string_value": threads}}
    config = {"name": "m", "backend": "onnxruntime", "parameters": parameters}
    model = batching.read({**config, "instance_group": [{"kind": "KIND_CPU", "count": count}]})
    (finding,) = batching.check_instances(model, FILE, cores, is_embedded=is_embedded)

    assert_finding(finding, WARNING if says else OK, *says)


@pytest.mark.parametrize(("backend", "kind"), [("python", "KIND_CPU"), ("onnxruntime", "KIND_GPU")])
def test_instances_elsewhere_are_not_judged(backend: str, kind: str) -> None:
    """Their number of threads is unknown or does not matter."""
    model = batching.read({"name": "m", "backend": backend, "instance_group": [{"kind": kind, "count": 64}]})

    assert list(batching.check_instances(model, FILE, 2.0, is_embedded=False)) == []
