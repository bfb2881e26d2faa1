"""List who uses a running gateway, and how long each caller's images wait."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families

from app.doctor.finding import Finding, count, ok
from app.host.http import get
from app.settings.schema import Settings

_SECONDS = 2.0
_UNAUTHORIZED = 401
_SHOWN = 5
_WAITS = "nereid_queue_seconds"


def check(settings: Settings) -> Iterator[Finding]:
    """List the callers with the most images since the start, if a gateway answers at the sockets or the port in the settings."""
    answers = (get(f"{settings.local_url}/metrics", _SECONDS, path) for path in settings.sockets)
    status, text = next(filter(None, answers), (0, ""))
    if status == _UNAUTHORIZED:
        yield ok("callers", f"{_WAITS} in /metrics tells who waits how long; it needs an API key with the scope health")
    elif _WAITS in text:
        yield ok("callers", _describe(text))


def _describe(text: str) -> str:
    images: Counter[str] = Counter()
    seconds: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            caller = sample.labels.get("caller", "")
            if sample.name == f"{_WAITS}_sum":
                seconds[caller] = seconds.get(caller, 0.0) + sample.value
            elif sample.name == f"{_WAITS}_count" and sample.labels["stage"] == "queue":
                images[caller] += int(sample.value)
    most = [
        f"{caller or 'unnamed'} {count(number, 'image')}, which waited {seconds[caller] / number * 1e3:.0f} ms on average"
        for caller, number in images.most_common(_SHOWN)
        if number
    ]
    return f"{count(len(images), 'caller')} so far: {'; '.join(most) or 'none'}"
