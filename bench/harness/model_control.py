"""The config of one model in a running Triton: read, and replaced for a while.

Triton is asked by a process of its own, because none may be forked where gRPC is in use.
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
    """Tells a Triton how to run a model."""

    def __init__(self, settings: Settings, model: str) -> None:
        self._environment = environment_of(ROOT) | variables(settings)
        self._model = model
        self._is_changed = False

    def read(self) -> dict[str, Any]:
        """Return the config that is in use, as Triton's JSON.

        Raises:
            ContestantError: Triton does not answer, or has not loaded the model.
        """
        return dict(self._ask(None))

    def load(self, config: Mapping[str, Any]) -> None:
        """Load the model with another config. If Triton cannot do that, it goes on with the one before.

        Raises:
            ContestantError: Triton does not do it; the message contains what it says.
        """
        self._is_changed = True
        self._ask(config)

    @contextmanager
    def restored(self) -> Iterator[dict[str, Any]]:
        """Hand out the config that is in use, and load it again when the block ends, if another was loaded.

        Raises:
            ContestantError: As `read` and `load` say.
        """
        original = self.read()
        try:
            yield original
        finally:
            if self._is_changed:
                interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
                try:
                    # Told to load it without a config, Triton keeps the one it was given, because no file has changed.
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
            start_new_session=True,  # a Ctrl-C reaches only us
        )
        if asked.returncode:
            said = asked.stderr.strip().rpartition("\n")[2]
            raise ContestantError(f"Triton does not {'read' if config is None else 'load'} {self._model}: {said}")
        return json.loads(asked.stdout)


async def _answer(settings: Settings, model: str, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Load a model if there is a config, and return the config that is in use."""
    client = TritonClient(
        settings.triton_address, settings.control_key_path, credentials=credentials.load(settings.triton_tls_files)
    )
    try:
        if config is not None:
            request = service_pb2.RepositoryModelLoadRequest(model_name=model)
            request.parameters["config"].string_param = json.dumps(config)
            await client.ask("RepositoryModelLoad", request, _LOAD_SECONDS)
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
