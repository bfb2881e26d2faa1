"""Triton's statistics of one model, over HTTP."""

import json
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.error import HTTPError

from app.host.http import LOOPBACK
from bench.report.measurements import TritonUse

_SECONDS = 5


class CountersError(Exception):
    """Triton's statistics cannot be read; the message is one line."""


class Counters(NamedTuple):
    """Statistics of a model since it was loaded. Times are in nanoseconds, summed over requests."""

    inferences: int
    executions: int
    successes: int
    """Successful requests."""
    compute_ns: int
    waits: int
    """Requests that waited in the queue."""
    queue_ns: int
    batches: dict[str, int]
    """Executions by batch size."""

    @classmethod
    def total(cls, several: Sequence["Counters"]) -> "Counters":
        """Add up the statistics of a model in several Tritons."""
        batches: Counter[str] = Counter()
        for one in several:
            batches.update(one.batches)
        return cls(
            inferences=sum(one.inferences for one in several),
            executions=sum(one.executions for one in several),
            successes=sum(one.successes for one in several),
            compute_ns=sum(one.compute_ns for one in several),
            waits=sum(one.waits for one in several),
            queue_ns=sum(one.queue_ns for one in several),
            batches=dict(batches),
        )

    def since(self, before: "Counters") -> TritonUse:
        """Return the statistics since `before`."""
        successes, waits = self.successes - before.successes, self.waits - before.waits
        batches = {size: count - before.batches.get(size, 0) for size, count in self.batches.items()}
        return TritonUse(
            inferences=self.inferences - before.inferences,
            executions=self.executions - before.executions,
            queue_ms=(self.queue_ns - before.queue_ns) / waits / 1e6 if waits else 0.0,
            compute_ms=(self.compute_ns - before.compute_ns) / successes / 1e6 if successes else 0.0,
            batches={size: count for size, count in batches.items() if count},
        )


def read_counters(triton: str, model: str) -> Counters:
    """Read the statistics of a model, summed over its versions.

    Args:
        triton: URL of its HTTP endpoint, on this machine.
        model: Name of the model.

    Raises:
        CountersError: Triton does not respond, or does not have the model.
    """
    try:
        with LOOPBACK.open(f"{triton}/v2/models/{model}/stats", timeout=_SECONDS) as answer:
            return _add_up(json.load(answer)["model_stats"])
    except HTTPError as error:
        with error:
            reason = error.read().decode("utf-8", "replace").strip()[:100]
        raise CountersError(f"Triton at {triton}: {error.code} {reason}") from error
    except (OSError, HTTPException) as error:
        raise CountersError(f"Triton at {triton}: {error}") from error
    except (LookupError, ValueError, TypeError) as error:
        raise CountersError(f"Triton at {triton}: its answer contains no statistics of {model}") from error


def _add_up(versions: list[dict[str, Any]]) -> Counters:
    def total(*path: str) -> int:
        """Add up a number over the versions; Triton omits zeros."""
        count = 0
        for stats in versions:
            value: Any = stats
            for name in path:
                value = value.get(name, {})
            count += int(value or 0)
        return count

    batches: dict[str, int] = {}
    for entry in (entry for stats in versions for entry in stats.get("batch_stats", [])):
        size = str(entry["batch_size"])
        batches[size] = batches.get(size, 0) + int(entry["compute_infer"]["count"])
    return Counters(
        inferences=total("inference_count"),
        executions=total("execution_count"),
        successes=total("inference_stats", "success", "count"),
        compute_ns=sum(total("inference_stats", part, "ns") for part in ("compute_input", "compute_infer", "compute_output")),
        waits=total("inference_stats", "queue", "count"),
        queue_ns=total("inference_stats", "queue", "ns"),
        batches=batches,
    )
