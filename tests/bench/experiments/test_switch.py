"""Changes of the default version."""

import pytest

from bench.__main__ import main
from bench.load.images import SAMPLE_FOLDER
from tests.programs import require_program


@pytest.mark.system
def test_no_request_fails(capsys: pytest.CaptureFixture[str]) -> None:
    """A version is added, and another one is made the default one again."""
    require_program("nginx", "nginx")

    assert main(["switch", "--switches", "2", "--seconds", "1", "--clients", "4", "--images", str(SAMPLE_FOLDER)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("between ", "during "))]
    assert [(row[0], row[-1]) for row in rows] == [("between", "0"), ("during", "0")]
