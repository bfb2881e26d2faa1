"""Read the GPUs of Tritons from their metrics."""

import asyncio
import math
from collections.abc import Iterable
from typing import NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

_SECONDS = 1.0


class Gpu(NamedTuple):
    """A GPU of a Triton. Numbers are None if Triton does not report them."""

    id: str
    """NVIDIA's id: `GPU-` and a UUID."""
    utilization: float | None
    """0 to 1, over about the last second."""
    memory_used_bytes: int | None
    memory_total_bytes: int | None


_FIELDS = {
    "nv_gpu_utilization": "utilization",
    "nv_gpu_memory_used_bytes": "memory_used_bytes",
    "nv_gpu_memory_total_bytes": "memory_total_bytes",
}


async def read_gpus(metrics_urls: Iterable[str]) -> list[Gpu]:
    """Return the GPUs of the Tritons that answer at URLs such as `http://127.0.0.1:4602/metrics`, each GPU once."""
    found = await asyncio.gather(*map(_read_gpus, metrics_urls))
    return list({gpu.id: gpu for gpus in found for gpu in gpus}.values())  # two Tritons may share a GPU


async def _read_gpus(metrics_url: str) -> list[Gpu]:
    needs_tls = metrics_url.startswith("https:")  # loading the certificates takes longer than the request
    try:
        async with asyncio.timeout(_SECONDS), httpx.AsyncClient(trust_env=False, verify=needs_tls) as client:
            answer = (await client.get(metrics_url)).raise_for_status()
        families = list(text_string_to_metric_families(answer.text))
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TimeoutError):
        return []
    found: dict[str, dict[str, float]] = {}
    for family in families:
        for sample in family.samples:
            if sample.name in _FIELDS and math.isfinite(sample.value):
                found.setdefault(sample.labels.get("gpu_uuid", ""), {})[_FIELDS[sample.name]] = sample.value
    return [
        Gpu(id_, fields.get("utilization"), _whole(fields.get("memory_used_bytes")), _whole(fields.get("memory_total_bytes")))
        for id_, fields in sorted(found.items())
    ]


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
