"""A clock that stands still."""

import pytest


class Clock:
    """Takes the place of `monotonic` in a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
        self.now = 1000.0
        """Seconds; a test may set it."""
        monkeypatch.setattr(f"{module}.monotonic", self)

    def __call__(self) -> float:
        return self.now
