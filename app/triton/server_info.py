"""What a Triton says of itself, and of the models in its repository."""

import re
from collections.abc import Iterable
from typing import NamedTuple

# Before this version a cancelled or expired RPC can crash the whole server: pull requests 7840, 8078, 8220 of Triton's server.
_FIRST_CANCEL_SAFE = (2, 59, 1)


class ServerInfo(NamedTuple):
    """What a Triton says of itself."""

    version: str
    extensions: tuple[str, ...] = ()
    """Names of the protocols that it speaks besides inference."""

    @property
    def survives_cancel(self) -> bool:
        """Whether an inference may be cancelled without the risk of crashing the server."""
        return tuple(int(part) for part in re.findall(r"\d+", self.version)[:3]) >= _FIRST_CANCEL_SAFE


class ModelState(NamedTuple):
    """One model in Triton's repository."""

    state: str
    """READY, UNAVAILABLE, LOADING ..., or empty if Triton has refused to load it without a reason that it keeps."""
    reason: str
    """Why it is not ready, one line; empty if it is, or if only Triton's log tells."""
    versions: frozenset[str] = frozenset()
    """Those that are ready."""

    @property
    def is_ready(self) -> bool:
        """Whether it can be used."""
        return self.state == "READY"


def state_of(state: str, reason: str, version: str) -> ModelState:
    """Describe one version of a model, as it is in the index of Triton's repository; the reason becomes one line."""
    ready = {version} if state == "READY" else set()
    return ModelState(state, " ".join(reason.partition("\n")[0].split()), frozenset(ready))


def join_states(items: Iterable[tuple[str, ModelState]]) -> dict[str, ModelState]:
    """Put together what is known of each model, by name: of its versions, or on several Tritons. It is ready if any of them is."""
    states: dict[str, ModelState] = {}
    for name, state in items:
        known = states.get(name, state)
        best = state if state.is_ready and not known.is_ready else known
        states[name] = best._replace(versions=known.versions | state.versions)
    return states
