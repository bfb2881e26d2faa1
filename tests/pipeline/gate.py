"""A gate that blocks a step in its thread."""

import threading
from typing import Any

import pytest

from tests.processes import PATIENCE_SECONDS


class Gate:
    """Blocks a step in its thread until the gate is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def block(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:  # noqa: ANN401
        """Block a step; return a list that gets the names of the threads that reach it."""
        step = getattr(module, name)
        entered: list[str] = []

        def blocked(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            entered.append(threading.current_thread().name)
            self.reached.set()
            self.opened.wait(PATIENCE_SECONDS)
            return step(*arguments, **keywords)

        monkeypatch.setattr(module, name, blocked)
        return entered
