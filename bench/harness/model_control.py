"""Read the config of one model in a running Triton, and replace it temporarily.

A separate process calls Triton, because a process that uses gRPC must not fork.
"""

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from tritonclient.grpc import service_pb2

from app.errors import GatewayError
from app.settings.schema import Settings
from app.triton import credentials
from app.triton.client import TritonClient
from app.triton.status import own_message
from bench.harness.errors import ContestantError
from bench.harness.processes import calling

T = TypeVar("T")

_LOAD_SECONDS = 1200.0
"""TensorRT may build engines."""

Config = Mapping[str, Any]
"""A model's config as Triton's JSON."""


class ModelControl:
    """Controls the config of a model in Triton."""

    def __init__(self, settings: Settings, model: str) -> None:
        self._settings = settings
        self._model = model
        self._is_changed = False

    def read(self) -> Config:
        """Return the current config.

        Raises:
            ContestantError: Triton does not respond, or has not loaded the model.
        """
        return self._ask(None)

    def load(self, config: Config) -> None:
        """Load the model with another config. If this fails, Triton keeps the previous one.

        Raises:
            ContestantError: The load failed; the message contains Triton's error.
        """
        self._is_changed = True
        self._ask(config)

    @contextmanager
    def restored(self) -> Iterator[Config]:
        """Yield the current config; if another one was loaded, restore it when the block ends. Raises as `read` and `load` do."""
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

    def _ask(self, config: Config | None) -> Config:
        with calling(_ask, self._settings, self._model, config) as wait:
            return wait()


def _ask(settings: Settings, model: str, config: Config | None) -> Config:
    """Load a model if a config is given; return the current config."""

    async def ask(client: TritonClient) -> Config:
        if config is not None:
            parameters = {"config": service_pb2.ModelRepositoryParameter(string_param=json.dumps(config))}
            await client.ask("RepositoryModelLoad", _LOAD_SECONDS, model_name=model, parameters=parameters)
        return (await client.read_config(model))[0]

    return call(settings, ask, f"Triton does not {'read' if config is None else 'load'} {model}")


def call(settings: Settings, work: Callable[[TritonClient], Awaitable[T]], failure: str) -> T:
    """Do some work with the Triton of the settings; an error of this is a ContestantError that begins with `failure`."""

    async def connected() -> T:
        tls = credentials.load(settings.triton_tls_folder)
        client = TritonClient(settings.triton_address, settings.control_key_path, credentials=tls)
        try:
            return await work(client)
        finally:
            await client.close()

    try:
        return asyncio.run(connected())
    except GatewayError as error:
        raise ContestantError(f"{failure}: {own_message(error)}") from None
