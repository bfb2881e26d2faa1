"""What runs if no experiment is named."""

from typing import Any

import pytest

from bench.__main__ import main
from bench.experiments import overview


def test_without_a_name_the_overview_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def run(options: Any) -> int:  # noqa: ANN401
        seen.append(options)
        return 0

    monkeypatch.setattr(overview, "run", run)

    assert main([]) == 0
    assert seen[0].seconds == 30


@pytest.mark.system
def test_it_shows_a_table_and_where_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overview", "--seconds", "2", "--clients", "4", "--workers", "1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if "requests/s" in line)
    rows = {line.split("  ")[0]: line.split() for line in lines[head + 1 : head + 5]}
    assert {"Nereid", "limit: HTTP alone", "limit: decode and letterbox"} <= rows.keys()
    assert float(rows["Nereid"][1].replace(",", "")) > 0
    assert "./just bench quick" in "\n".join(lines)
