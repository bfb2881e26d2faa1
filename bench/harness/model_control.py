"""Read the config of one model in a running Triton, and replace it temporarily.

A separate process calls Triton, because a process that uses gRPC must not fork.
"""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tritonclient.grpc import service_pb2

from app.errors import GatewayError
from app.settings import environment
from app.settings.schema import Settings
from app.triton import credentials
from app.triton.client import TritonClient
from app.triton.status import own_message
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT, environment_of, variables

_LOAD_SECONDS = 1200.0
"""TensorRT may build engines."""


class ModelControl:
    """Controls the config of a model in Triton."""

    def __init__(self, settings: Settings, model: str) -> None:
        self._environment = environment_of(ROOT) | variables(settings)
        self._model = model
        self._is_changed = False

    def read(self) -> dict[str, Any]:
        """Return the current config as Triton's JSON.

        Raises:
            ContestantError: Triton does not respond, or has not loaded the model.
        """
        return dict(self._ask(None))

    def load(self, config: Mapping[str, Any]) -> None:
        """Load the model with another config. If this fails, Triton keeps the previous one.

        Raises:
            ContestantError: The load failed; the message contains Triton's error.
        """
        self._is_changed = True
        self._ask(config)

    @contextmanager
    def restored(self) -> Iterator[dict[str, Any]]:
        """Yield the current config; if another one was loaded, restore it when the block ends.

        Raises:
            ContestantError: As for `read` and `load`.
        """
        original = self.read()
        try:
            yield original
        finally:
            if self._is_changed:
                interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
                try:
                    # Loading without a config would keep the replaced one, because no file has changed.
                    self._ask(original)
                finally:
                    signal.signal(signal.SIGINT, interrupt)

    def _ask(self, config: Mapping[str, Any] | None) -> Any:  # noqa: ANN401 - JSON
        asked = subprocess.run(
            [sys.executable, "-m", __name__, self._model],
            cwd=ROOT,
            env=self._environment,
            input=json.dumps(config),
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,  # Ctrl-C must reach only the parent
        )
        if asked.returncode:
            said = asked.stderr.strip().rpartition("\n")[2]
            raise ContestantError(f"Triton does not {'read' if config is None else 'load'} {self._model}: {said}")
        return json.loads(asked.stdout)


async def _answer(settings: Settings, model: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Load a model if a config is given; return the current config."""
    client = TritonClient(
        settings.triton_address, settings.control_key_path, credentials=credentials.load(settings.triton_tls_folder)
    )
    try:
        if config is not None:
            parameters = {"config": service_pb2.ModelRepositoryParameter(string_param=json.dumps(config))}
            await client.ask("RepositoryModelLoad", _LOAD_SECONDS, model_name=model, parameters=parameters)
        return (await client.read_config(model))[0]
    finally:
        await client.close()


def _main() -> int:
    model = sys.argv[1]
    try:
        print(json.dumps(asyncio.run(_answer(environment.load(), model, json.load(sys.stdin)))))
    except GatewayError as error:
        print(own_message(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
