"""Whether models of one name on several Tritons can take each other's place."""

import msgspec

from app.model.spec import ModelSpec


def are_interchangeable(one: ModelSpec, other: ModelSpec) -> bool:
    """Return whether models take the same input and return the same outputs, wherever and however fast they run."""
    alike = msgspec.structs.replace(
        other,
        version=one.version,
        device=one.device,
        max_batch=one.max_batch,
        instances=one.instances,
        source=one.source,
        licence=one.licence,
    )
    return one == alike
