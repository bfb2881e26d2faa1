"""What the documentation says of errors, metrics and clients, against those that there are."""

import re

from prometheus_client.core import CounterMetricFamily

from app.resilience.worker_table import WorkerTable
from app.telemetry.metrics import Metrics
from tests.callers import table as clients
from tests.callers.client import pins
from tests.support import ROOT
from tests.test_errors import ERRORS


def test_each_code_has_a_cause_and_a_cure() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    _, *sections = re.split(r"^### ", page.partition("\n## Codes of NGINX\n")[0], flags=re.MULTILINE)
    codes = [section.partition("\n")[0] for section in sections]

    assert sorted(codes) == sorted([*(error.code for error in ERRORS), "internal_error", "method_not_allowed", "not_found"])
    for code, section in zip(codes, sections, strict=True):
        assert re.search(r"\n\nCause\n: .+\n\nCure\n: ", section, re.DOTALL), code
        assert code not in {error.code for error in ERRORS} or f"\n<!-- generated: error {code} -->\n" in section


def test_each_code_of_nginx_is_explained() -> None:
    config = (ROOT / "deploy" / "nginx" / "nereid.conf").read_text(encoding="utf-8")
    codes = re.findall(r"^    \w+ (\w+);$", config.partition("map $status $nereid_code {")[2].partition("}")[0], re.MULTILINE)
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")

    assert "rate_limited" in codes
    assert [code for code in codes if f"### {code}\n" not in page and f"`{code}`" not in page] == []


def test_the_runbook_names_metrics_that_exist(table: WorkerTable) -> None:
    families = list(Metrics(table, "1.2.3").collect())
    names = {family.name + ("_total" if isinstance(family, CounterMetricFamily) else "") for family in families}
    text = (ROOT / "docs" / "how-to" / "runbook.md").read_text(encoding="utf-8")

    assert names >= set(re.findall(r"`((?:api|nereid)_[a-z_]+)`", text)) != set()
    assert all(family.documentation.endswith(".") for family in families)


def test_the_table_of_clients_has_the_pinned_versions() -> None:
    """After a change: `./just clients --record`."""
    assert pins().items() <= {(row.client, row.version) for row in clients.read()}
