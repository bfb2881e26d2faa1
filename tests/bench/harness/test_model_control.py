"""The config of a model in a real Triton that may be told to load it."""

import copy

import pytest

from app.settings.schema import Settings
from bench.harness.errors import ContestantError
from bench.harness.model_control import ModelControl
from bench.harness.triton import Triton


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


def test_what_triton_cannot_load_leaves_the_model_as_it_is(reloadable: Settings) -> None:
    control = ModelControl(reloadable, "wait_20")
    before = control.read()
    with pytest.raises(ContestantError, match=r"^Triton does not load wait_20: load failed .*nonsense"), control.restored():
        control.load({**before, "backend": "nonsense"})

    assert control.read() == before


def test_a_triton_that_may_not_be_told_is_one_line(fixtures: Triton) -> None:
    with pytest.raises(ContestantError, match=r"Triton does not load null: .*not allowed"):
        ModelControl(fixtures.settings, "null").load({})
    with pytest.raises(ContestantError, match=r"Triton does not read nothing: .*unknown model"):
        ModelControl(fixtures.settings, "nothing").read()
