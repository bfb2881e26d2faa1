"""The candidates by name."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.experiments.candidates.registry import CANDIDATES, NEREID, steps_of

PRINT_IMPORTS = """
import sys
from bench.experiments.candidates import registry
print(*sorted(name for name in sys.modules if name.startswith((registry.__package__, "app"))))
"""


@pytest.mark.parametrize("name", sorted(CANDIDATES))
def test_every_candidate_names_a_function_of_a_module(name: str) -> None:
    """The module lies in the package of the candidates and defines the function."""
    module, _, function = CANDIDATES[name].partition(":")
    spec = find_spec(f"bench.experiments.candidates.{module}")

    assert spec is not None
    assert spec.origin is not None
    assert f"def {function}() -> dict[str, Step]:" in Path(spec.origin).read_text(encoding="utf-8")


def test_the_candidates_of_nereid_are_in_its_module() -> None:
    """Only Nereid's candidates also run from another checkout."""
    assert [name for name, place in CANDIDATES.items() if place.startswith("nereid:")] == list(NEREID)


def test_the_registry_imports_no_candidate() -> None:
    """A candidate may need packages that the environment of another one does not have."""
    shown = subprocess.run([sys.executable, "-c", PRINT_IMPORTS], capture_output=True, text=True, check=True).stdout

    assert shown.split() == ["bench.experiments.candidates", "bench.experiments.candidates.registry"]


def test_the_steps_of_a_candidate_are_in_order() -> None:
    assert list(steps_of("opencv")) == ["decode", "letterbox"]
    assert list(steps_of("pillow")) == ["header", "decode", "letterbox"]


def test_an_unknown_candidate_is_an_error() -> None:
    with pytest.raises(KeyError, match="other"):
        steps_of("other")
