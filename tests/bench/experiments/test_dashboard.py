"""Drawing the dashboard from a Prometheus; with a service of its own, `tests/deploy/test_live.py` does so."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments.dashboard import DASHBOARD
from bench.harness.prometheus import running_prometheus
from bench.report.dashboard import load_dashboard
from tests.bench.report.elements import Elements
from tests.programs import require_program
from tests.support import free_port


@pytest.mark.system
def test_it_draws_what_a_prometheus_has(tmp_path: Path) -> None:
    """Every panel is on the page, also if there is nothing to show in it."""
    require_program("prometheus", "prometheus")
    output = tmp_path / "out.html"
    with running_prometheus({"nereid": "127.0.0.1:1", "triton": "127.0.0.1:2"}, tmp_path, scrape_seconds=0.2) as prometheus:
        assert main(["dashboard", "--prometheus", f"{prometheus.url}/", "--minutes", "1", "-o", str(output)]) == 0
    page = output.read_text(encoding="utf-8")

    assert not Elements(page).open
    assert all(panel.title in page for panel in load_dashboard(DASHBOARD).panels)
    assert "no data" in page


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot be read"), (b"{}", "is no dashboard"), (DASHBOARD.read_bytes(), "cannot be asked")]
)
def test_what_is_missing_is_one_line(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dashboard.json"
    if content is not None:
        file.write_bytes(content)

    assert main(["dashboard", "--prometheus", f"http://127.0.0.1:{free_port()}", "--dashboard", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.system
def test_a_page_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_program("prometheus", "prometheus")
    with running_prometheus({"nereid": "127.0.0.1:1", "triton": "127.0.0.1:2"}, tmp_path, scrape_seconds=0.2) as prometheus:
        assert main(["dashboard", "--prometheus", prometheus.url, "-o", str(tmp_path)]) == 1

    assert f"{tmp_path} cannot be written" in capsys.readouterr().err
