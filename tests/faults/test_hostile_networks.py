"""Hostile and damaged networks are added to a Triton that serves, or refused: it never dies, and nothing is left."""

from collections import Counter
from functools import partial
from pathlib import Path

import msgspec
import pytest

from app.embedded import control
from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from app.zoo import sandbox
from app.zoo.repository import Repository
from tests.fakes import models
from tests.support import triton_home
from tests.zoo.exported import exported
from tests.zoo.hostile import add_hostile, hostile, mutated

_HOSTILE, _MUTATED = 50, 150


def test_served_triton_survives_hostile_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 5.0)
    home, served = tmp_path / "triton", tmp_path / "served"
    home.mkdir()
    served.mkdir()
    models.write(tmp_path / "all")
    (tmp_path / "all" / "six_columns").rename(served / "six_columns")
    settings = Settings(triton_home=triton_home(home), model_repository=str(served), model="six_columns")
    apart = Repository(tmp_path / "added")
    apply = partial(control.apply, msgspec.structs.replace(settings, model_repository=str(apart.path)))
    whole = exported({"output0": (7, 84)}, (64, 64)).SerializeToString()
    added = Counter[str]()
    triton = EmbeddedTriton(settings)
    triton.claim()
    try:
        triton.start()
        for kind, content in [*hostile(_HOSTILE), *(("mutated", content) for content in mutated(whole, _MUTATED))]:
            added[kind] += not add_hostile(content, apart, apply)
            assert triton.poll() is None, kind
        triton.check()
    finally:
        triton.stop()

    assert added["mutated"] > _MUTATED / 10  # whose weights are other ones
    assert not any(added[kind] for kind in ("endless", "claiming", "limited", "nested", "outside", "foreign"))
