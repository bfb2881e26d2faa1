"""The metrics, from those that `GET /metrics` exports."""

from app import feature
from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics
from app.triton.metrics import triton_metrics
from generated.markdown import define


def render() -> str:
    """Describe all metrics, in the order in which they are exported."""
    table = WorkerTable()
    parts = []
    for family in [*Metrics(table, "", feature.instruments(table)).collect(), *triton_metrics(table)]:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = ", ".join(f"`{label}`" for label in vars(family)["_labelnames"])  # the samples, which have them, come later
        remark = f"{family.type}; labels {labels}" if labels else family.type
        parts.append(define(name, remark, family.documentation, anchor=name.replace("_", "-")))
    table.close()
    return "\n".join(parts)
