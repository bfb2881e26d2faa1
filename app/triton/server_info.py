"""A Triton's version and extensions, and the states of the models in its repository."""

import re
from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import msgspec

# Before this version a cancelled or expired RPC can crash the whole server: pull requests 7840, 8078, 8220 of Triton's server.
_FIRST_CANCEL_SAFE = (2, 59, 1)


class ServerInfo(msgspec.Struct, frozen=True, dict=True):  # `dict` for the cached property
    """A Triton's version and extensions."""

    version: str
    extensions: tuple[str, ...] = ()
    """Names of the supported protocols besides inference."""

    @cached_property
    def survives_cancel(self) -> bool:
        """Whether an inference may be cancelled without the risk of crashing the server."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3]) >= _FIRST_CANCEL_SAFE


class ModelState(NamedTuple):
    """The state of a model in Triton's repository."""

    state: str
    """READY, UNAVAILABLE, LOADING ..., or empty if Triton did not load the model and did not keep the reason."""
    reason: str
    """Why the model is not ready, one line; empty if it is ready, or if only Triton's log contains the reason."""
    versions: frozenset[str] = frozenset()
    """Versions that are ready."""

    @property
    def is_ready(self) -> bool:
        """Whether the model can be used."""
        return self.state == "READY"


def state_of(state: str, reason: str, version: str) -> ModelState:
    """Return the state of one version, from an entry in the index of Triton's repository."""
    ready = {version} if state == "READY" else set()
    return ModelState(state, " ".join(reason.partition("\n")[0].split()), frozenset(ready))


def join_states(items: Iterable[tuple[str, ModelState]]) -> dict[str, ModelState]:
    """Merge the states of a model's versions, or on several Tritons, by model name. A model is ready if any state is."""
    states: dict[str, ModelState] = {}
    for name, state in items:
        known = states.get(name, state)
        best = state if state.is_ready and not known.is_ready else known
        states[name] = best._replace(versions=known.versions | state.versions)
    return states
