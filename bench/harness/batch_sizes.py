"""Batch sizes of the gateway's calls to Triton, from its own metrics."""

from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from app.host.http import get
from bench.harness.errors import ContestantError

_SECONDS = 5
_BUCKET = "api_inference_batch_size_bucket"


def read_batch_sizes(gateway: str, model: str) -> Counter[str]:
    """Return the number of the gateway's calls for a model since its start, by batch size.

    Args:
        gateway: URL of the gateway, on this machine.
        model: Name of the model.

    Raises:
        ContestantError: The gateway's metrics cannot be read.
    """
    answer = get(f"{gateway}/metrics", _SECONDS)
    if answer is None:
        raise ContestantError(f"the metrics of {gateway} cannot be read")
    try:
        families = list(text_string_to_metric_families(answer[1]))
    except ValueError as error:
        raise ContestantError(f"the metrics of {gateway} cannot be read: {error}") from error
    buckets = [sample for family in families for sample in family.samples if sample.name == _BUCKET]
    return _count(sorted((float(one.labels["le"]), int(one.value)) for one in buckets if one.labels["model"] == model))


def _count(buckets: list[tuple[float, int]]) -> Counter[str]:
    """Convert cumulative buckets to counts by range of sizes."""
    counts: Counter[str] = Counter()
    last, before = 0, 0
    for bound, calls in buckets:
        largest = "" if bound == float("inf") else str(int(bound))
        counts[largest if largest == str(last + 1) else f"{last + 1}-{largest}"] = calls - before
        last, before = int(bound) if largest else last, calls
    return counts
