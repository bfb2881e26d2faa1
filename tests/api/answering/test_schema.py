"""The JSON of the responses, member by member; what other tests of them leave out."""

import msgspec

from app.api.answering.schema import ModelInfo


def test_a_model_that_is_not_ready_has_no_description() -> None:
    """Its members are there all the same, so that clients need not check for them."""
    assert msgspec.to_builtins(ModelInfo("tiny", "not_ready")) == {
        "name": "tiny",
        "state": "not_ready",
        "version": None,
        "versions": [],
        "width": None,
        "height": None,
        "task": None,
        "output_format": None,
        "device": None,
        "classes": [],
        "source": None,
        "licence": None,
        "detail": None,
        "status": None,
        "backend": None,
        "max_batch_size": None,
        "has_labels": False,
        "num_classes": None,
        "input_shape": None,
    }
