"""The metrics of a gateway, as Prometheus reads them."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[str, float]
"""By name and labels, as the text format writes them: `name{label="value"}`."""


async def scrape(client: httpx.AsyncClient) -> Samples:
    answer = await client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return read_samples(answer.text)


def read_samples(text: str) -> Samples:
    return {
        sample.name + _write(sample.labels): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def _write(labels: dict[str, str]) -> str:
    pairs = ",".join(f'{name}="{value}"' for name, value in sorted(labels.items()))
    return f"{{{pairs}}}" if pairs else ""
