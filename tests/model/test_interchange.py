"""Models that can take each other's place."""

import msgspec
import pytest

from app.model.interchange import are_interchangeable
from tests.fakes.triton import SPEC


@pytest.mark.parametrize("change", [{}, {"version": "2"}, {"device": "gpu"}, {"max_batch": 64, "instances": 4}, {"licence": "MIT"}])
def test_where_and_how_fast_a_model_runs_does_not_matter(change: dict[str, object]) -> None:
    assert are_interchangeable(SPEC, msgspec.structs.replace(SPEC, **change))


@pytest.mark.parametrize(
    "change", [{"input_size": (64, 64)}, {"output_names": ("other",)}, {"labels": ("cat",)}, {"pad": 0}, {"channels": "BGR"}]
)
def test_what_goes_in_and_what_comes_out_matters(change: dict[str, object]) -> None:
    """The tensor was made for one spec, and the answer is read by that spec."""
    assert not are_interchangeable(SPEC, msgspec.structs.replace(SPEC, **change))
