"""The command line of the bench."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.report.records import save_record
from tests.bench.support import make_run, make_runs_record

NAMES = {
    *("quick", "full", "sustained", "sweep", "open", "overload", "fair", "capacity"),
    *("versus", "limit", "stages", "profile", "text", "tune", "search", "faces", "masks", "locust"),
    *("compare", "report"),
}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_every_experiment_explains_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])

    assert ended.value.code == 0
    assert "--help" in capsys.readouterr().out


def test_report_writes_a_page_and_compare_prints_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = tmp_path / "x.json", tmp_path / "x.html"
    save_record(file, make_runs_record(make_run()))

    assert main(["report", str(file), "-o", str(output)]) == 0
    assert output.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["compare", str(file), str(file)]) == 0
    assert "requests/s" in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"{}", b"no JSON"], ids=["missing", "other", "broken"])
def test_a_file_that_is_not_a_record_is_one_line(content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)

    assert main(["compare", str(path), str(path)]) == main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 1
    assert [str(path) in line for line in capsys.readouterr().err.splitlines()] == [True, True]
