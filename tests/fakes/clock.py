"""A clock that stands still."""

import pytest


class Clock:
    """Replaces `monotonic` in some modules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
        self.now = 1000.0
        """Seconds; a test may set it."""
        for module in modules:
            monkeypatch.setattr(f"{module}.monotonic", self)

    def __call__(self) -> float:
        return self.now
