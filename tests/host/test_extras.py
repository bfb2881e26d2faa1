"""Extras: what is installed, and what is told where it is not."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from app.host import extras
from tests.support import ROOT


def test_extras_are_those_of_the_package() -> None:
    declared: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = declared.pop("all")
    distributions = packages_distributions()

    assert set(re.split(r"[\[\],]", everything)[1:-1]) | {"cache"} == declared.keys()
    assert extras.MODULES.keys() == declared.keys() - {"models"}
    for extra, modules in extras.MODULES.items():
        named = " ".join(declared[extra]).replace("nereid-gateway[cache]", " ".join(declared["cache"]))
        for module in modules:
            assert any(name.replace("_", "-") in named for name in distributions[module.partition(".")[0]])


PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({absent}))
from app.host import extras
print(extras.missing({extra!r}) or "nothing", set(extras.MODULES[{extra!r}]) & sys.modules.keys() - {absent})
"""


@pytest.mark.parametrize(
    ("extra", "absent", "missing"),
    [
        *((extra, [], "nothing") for extra in extras.MODULES),
        ("search", ["asyncpg", "pgvector", "redis"], "asyncpg, pgvector"),
        ("otel", ["opentelemetry.exporter"], "opentelemetry.exporter.otlp.proto.http"),
        ("otel", ["opentelemetry"], "opentelemetry.sdk, opentelemetry.exporter.otlp.proto.http"),
    ],
)
def test_missing_modules_of_an_extra_are_named_without_importing_others(extra: str, absent: list[str], missing: str) -> None:
    program = PROGRAM.format(extra=extra, absent=set(absent))
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)

    assert ran.stdout == f"{missing} set()\n"
