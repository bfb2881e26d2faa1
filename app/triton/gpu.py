"""Read the GPUs of Tritons from their metrics."""

import asyncio
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

_SECONDS = 1.0
_PREFIX = "nv_gpu_"


class Gpu(NamedTuple):
    """A GPU of a Triton. Numbers are None if Triton does not report them."""

    id: str
    """NVIDIA's id: `GPU-` and a UUID."""
    utilization: float | None = None
    """0 to 1, over about the last second."""
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


async def read_gpus(metrics_urls: Iterable[str]) -> list[Gpu]:
    """Return the GPUs of the Tritons that answer at URLs such as `http://127.0.0.1:8002/metrics`, each GPU once."""
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
    found: dict[str, dict[str, Any]] = {}
    for family in families:
        for sample in family.samples:
            field = sample.name.removeprefix(_PREFIX)
            if sample.name.startswith(_PREFIX) and field in Gpu._fields and math.isfinite(sample.value):
                number = sample.value if field == "utilization" else int(sample.value)
                found.setdefault(sample.labels.get("gpu_uuid", ""), {})[field] = number
    return [Gpu(id_, **fields) for id_, fields in sorted(found.items())]
