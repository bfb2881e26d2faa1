"""Everything that Prometheus scrapes."""

import re

from prometheus_client.core import CounterMetricFamily
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST

from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics, render
from tests.support import ROOT


def test_every_metric_is_documented(table: WorkerTable) -> None:
    """The table of deploy/README.md has its name, and no name of ours that does not exist."""
    families = list(Metrics(table, "1.2.3").collect())
    names = {family.name + ("_total" if isinstance(family, CounterMetricFamily) else "") for family in families}
    documented = set(re.findall(r"`(api_[a-z_]+)`", (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")))

    assert documented == names
    assert all(family.documentation.endswith(".") for family in families)


def test_metrics_are_rendered_as_the_scraper_asks(table: WorkerTable) -> None:
    """In the text format unless it names OpenMetrics; both tell the version."""
    families = list(Metrics(table, "1.2.3").collect())
    text, text_type = render(families, "")
    openmetrics, openmetrics_type = render(families, CONTENT_TYPE_LATEST)

    assert text_type.startswith("text/plain")
    assert openmetrics_type.startswith("application/openmetrics-text")
    assert openmetrics.endswith(b"# EOF\n")
    for rendered in (text, openmetrics):
        assert b'version="1.2.3"' in rendered
