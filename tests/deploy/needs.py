"""How the shipped files are read, and what the application itself says of the settings and paths in them."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from app.api.application import table_of
from app.api.dialects import deepstack_names
from app.api.dialects.dialect import load as load_dialects
from app.api.routes import Target
from app.api.search import routes as search
from app.settings import rules
from app.settings.schema import DIALECTS, PREFIX, Settings
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
IMAGE = f"nereid:{tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']['version']}"

_OF_SEARCH = dict(table_of([deepstack_names.DIALECT], search.MODEL_ROUTES).paths)
# A worker only passes paths of search on. What is taken there is what counts.
PATHS: list[tuple[str, Target]] = [
    *((path, target) for path, target in table_of(load_dialects(DIALECTS)).paths if path not in _OF_SEARCH),
    *_OF_SEARCH.items(),
]
"""The paths at which models are asked, by workers and by the process of search, in Litestar's syntax, and their targets."""


def load(path: Path) -> Any:  # noqa: ANN401
    return msgspec.yaml.decode(path.read_bytes())


def defaults(text: str) -> str:
    """Replace Compose variables by their defaults."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


def nbytes(quantity: str) -> int:
    """Return the bytes of a quantity as Compose and Kubernetes write it, such as 2g and 2Gi."""
    number, unit = quantity.rstrip("gmiGM"), quantity.lstrip("0123456789").lower()
    return int(number) << {"": 0, "m": 20, "g": 30}[unit.removesuffix("i")]


def settings_of(environment: Mapping[str, str]) -> Settings:
    """Make the settings of an environment; each must be one that the application knows, and all must fit each other."""
    values = {name.removeprefix(PREFIX).lower(): defaults(value) for name, value in environment.items() if name.startswith(PREFIX)}
    settings = msgspec.convert(values, Settings, strict=False)
    rules.check(settings)
    return settings


def upstream(file: str) -> list[str]:
    """Return the instances in a file for NGINX."""
    return re.findall(r"^\s*server (\S+?)[ ;](?!.*backup)", (DEPLOY / "nginx" / file).read_text(encoding="utf-8"), re.MULTILINE)
