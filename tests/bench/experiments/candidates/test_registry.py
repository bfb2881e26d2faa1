"""The candidates by name."""

import subprocess
import sys

PRINT_IMPORTS = """
import sys
from bench.experiments.candidates import registry
print(*sorted(name for name in sys.modules if name.startswith((registry.__package__, "app"))))
"""


def test_the_registry_imports_no_candidate() -> None:
    """A candidate may need packages that the environment of another one does not have."""
    shown = subprocess.run([sys.executable, "-c", PRINT_IMPORTS], capture_output=True, text=True, check=True).stdout

    assert shown.split() == ["bench.experiments.candidates", "bench.experiments.candidates.registry"]
