"""A route: a name that stands for models, as in the routes file and in `PUT /routes/{name}`."""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

_UNITS = 10**9  # the precision of shares
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"

RouteName = Annotated[str, Meta(pattern=rf"\A{_NAME}\Z", description="Name of a route; no model has it.")]
Reference = Annotated[str, Meta(pattern=rf"\A{_NAME}(:[1-9][0-9]{{0,17}})?\Z", description="`model`, or `model:version`.")]
Share = Annotated[float, Meta(ge=0, le=1, description="Fraction of the requests, 0 to 1.")]


class Canary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that answers a share of the requests, until it fails more often or takes longer than the route allows."""

    to: Reference
    share: Share
    max_error_rate: Annotated[float, Meta(ge=0, le=1, description="By how much its error rate may exceed the default's.")] = 0.02
    max_p99_ratio: Annotated[float, Meta(ge=1, le=1000, description="Its 99th percentile, divided by the default's.")] = 1.5
    withdrawn: Annotated[
        str,
        Meta(max_length=500, pattern=r"\A[^\x00-\x1f\x7f]*\Z", description="Why it gets no requests any more; empty if it does."),
    ] = ""


class Shadow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A model that also gets a share of the images, after their answers have left."""

    to: Reference
    share: Share
    keep: Annotated[
        str, Meta(max_length=4000, description="Folder for the ten pictures that differ most; only the routes file sets it.")
    ] = ""


class Route(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The models for which a name stands. Without a version, a reference means the default version of the model."""

    to: Reference
    canary: Canary | None = None
    shadow: Shadow | None = None
    fallback: Annotated[Reference, Meta(description="Answers while the circuit of `to` is open.")] | None = None

    @property
    def references(self) -> list[tuple[str, str]]:
        """The references to models with the fields that have them."""
        fields = {"to": self.to, "canary": self.canary and self.canary.to, "shadow": self.shadow and self.shadow.to}
        return [(field, reference) for field, reference in {**fields, "fallback": self.fallback}.items() if reference]


def is_in_share(number: int, share: float) -> bool:
    """Return whether the request with this number, from 1 on, belongs to a share, so that `n * share` of the first `n` do."""
    units = round(share * _UNITS)
    return number * units // _UNITS > (number - 1) * units // _UNITS


def is_key_in_share(name: str, key: str, share: float) -> bool:
    """Return whether the requests for a route with this key belong to a share: by a hash, so that a larger share has them, too."""
    digest = blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) * _UNITS < round(share * _UNITS) << 64
