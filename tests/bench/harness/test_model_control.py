"""The config of a model in a real Triton that may be told to load it."""

import copy
from pathlib import Path

import pytest

from app.settings.schema import Settings
from bench.harness.errors import ContestantError
from bench.harness.model_control import ModelControl
from bench.harness.ports import find_free
from bench.harness.triton import embedded_triton
from bench.models.repository import write_fixture


def test_a_model_is_loaded_with_another_config_for_a_while(reloadable: Settings) -> None:
    control = ModelControl(reloadable, "wait_20")
    before = control.read()
    changed = copy.deepcopy(before)
    changed["instance_group"][0]["count"] = 2
    with control.restored() as config:
        control.load(changed)

        assert config == before
        assert control.read() == changed
    assert control.read() == before


def test_a_config_that_triton_cannot_load_leaves_the_model_as_it_is(reloadable: Settings) -> None:
    control = ModelControl(reloadable, "wait_20")
    before = control.read()
    with pytest.raises(ContestantError, match=r"^Triton does not load wait_20: load failed .*nonsense"), control.restored():
        control.load({**before, "backend": "nonsense"})

    assert control.read() == before


def test_a_triton_that_may_not_be_told_is_one_line(tmp_path: Path) -> None:
    """Such as one with TCP ports."""
    write_fixture("wait_20", tmp_path)
    with embedded_triton(tmp_path, "wait_20", find_free(2)[0]) as triton:
        with pytest.raises(ContestantError, match=r"Triton does not load wait_20: .*not allowed"):
            ModelControl(triton.settings, "wait_20").load({})
        with pytest.raises(ContestantError, match=r"Triton does not read nothing: .*unknown model"):
            ModelControl(triton.settings, "nothing").read()
