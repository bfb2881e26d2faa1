"""The table of `nereid compare`: how the answers of a route's shadow differ from those that callers got."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from app.host.http import get
from app.host.program import CommandError

_SECONDS = 5.0
_OK, _REFUSED = 200, {401, 403}
_ALL = "all"
_HEAD = ("class", "boxes", "agreement", "missing", "additional", "mean IoU", "score")


def report(url: str, sockets: Iterable[Path | None], route: str, key_file: Path | None) -> str:
    """Ask a gateway at a URL or at its unix sockets, with the API key in a file if there is one, and compare answers for a route.

    Raises:
        CommandError: There is nothing to compare.
    """
    try:
        key = key_file.read_text(encoding="utf-8").strip() if key_file else ""
    except OSError as error:
        raise CommandError(f"{key_file}: {error.strerror}") from error
    answers = (get(f"{url}/metrics", _SECONDS, path, key) for path in sockets)
    status, text = next(filter(None, answers), (0, ""))
    if status in _REFUSED:
        raise CommandError("/metrics needs an API key with the scope health: name a file that contains one with --key-file")
    if status != _OK:
        raise CommandError(f"no gateway answers at {url}")
    if not (lines := list(_lines(text, route))):
        raise CommandError(f"no image of a route {route} was sent to a shadow since the gateway started")
    return "\n".join(lines)


def _lines(metrics: str, route: str) -> Iterator[str]:
    images: dict[str, Counter[str]] = defaultdict(Counter)
    pairs: dict[tuple[str, str], dict[str, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for family in text_string_to_metric_families(metrics):
        for name, labels, value, *_ in family.samples if family.name.startswith("api_shadow_") else ():
            if labels["route"] == route and family.name == "api_shadow_images":
                images[labels["model"]][labels["result"]] += int(value)
            elif labels["route"] == route:
                kind = name.removeprefix("api_shadow_") + (labels.get("answer") or labels.get("result") or "")
                for label in {labels.get("class", _ALL), _ALL}:
                    pairs[labels["against"], labels["model"]][label][kind] += value  # type: ignore[assignment]
    for (against, model), found in sorted(pairs.items()):
        count, sums = (
            {answer: found[_ALL][f"infer_seconds_{end}{answer}"] for answer in ("given", "shadow")} for end in ("count", "sum")
        )
        given, shadow = (f"{sums[answer] / max(1, count[answer]) * 1e3:.1f} ms" for answer in count)
        yield f"{route}: {model} ({shadow}) compared with {against} ({given}), {count['shadow']:.0f} images"
        rows = [_HEAD, *(_row(label, found[label]) for label in sorted(found, key=lambda label: (label != _ALL, label)))]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for first, *others in rows:
            yield "  ".join([first.ljust(widths[0]), *map(str.rjust, others, widths[1:])])
    for model, results in sorted(images.items()):
        yield f"images for {model}: {', '.join(f'{results[result]} {result}' for result in ('compared', 'dropped', 'failed'))}"


def _row(label: str, found: Counter[str]) -> tuple[str, ...]:
    """Return the cells of a class; `boxes` are those of the answers that callers got."""
    matched, missing, additional = (found[f"boxes_total{result}"] for result in ("matched", "missing", "additional"))
    agreement = f"{matched / (matched + missing + additional):.1%}" if matched + missing + additional else "-"
    iou, given, shadow = (found[kind] / max(1, matched) for kind in ("iou_sum", "score_sumgiven", "score_sumshadow"))
    means = (f"{iou:.3f}", f"{shadow - given:+.3f}") if matched else ("-", "-")
    return label, f"{matched + missing:.0f}", agreement, f"{missing:.0f}", f"{additional:.0f}", *means
