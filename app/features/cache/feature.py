"""The cache as a feature of the gateway."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.feature import Feature
from app.features.cache import memory
from app.features.cache.networks import CLEARED
from app.features.cache.settings import CacheSettings
from app.host import extras
from app.host.program import CommandError
from app.settings.schema import PREFIX, Settings, SettingsError
from app.telemetry.logging import say

if TYPE_CHECKING:
    from app.pipeline.pipeline import Pipeline
    from app.telemetry.metrics import Metrics

_EXTRAS = {"cache": ("blake3",), "redis": ("blake3", "redis")}


def _check(settings: Settings) -> None:
    if settings.of(CacheSettings).cache and settings.triton_endpoints and not settings.triton_loads_models:
        raise SettingsError(
            f"{PREFIX}CACHE: nobody tells here which networks these Tritons run; it needs {PREFIX}TRITON_LOADS_MODELS, or the "
            "embedded Triton"
        )


def _needs(settings: Settings) -> tuple[str, str]:
    cache = settings.of(CacheSettings).cache
    return "cache" if cache == "memory" else cache and "redis", "cache"


def _open_redis(cache: str) -> None:
    if cache != "memory":
        from app.features.cache.redis_store import open_pool  # noqa: PLC0415 - an extra

        open_pool(cache)


def _share(settings: Settings) -> list[int]:
    chosen = settings.of(CacheSettings)
    return [memory.create(chosen.memory_bytes)] if chosen.cache else []


def _open(settings: Settings, pipeline: "Pipeline", metrics: "Metrics", stack: AsyncExitStack) -> list[Coroutine[Any, Any, None]]:
    if not settings.of(CacheSettings).cache:
        return []
    from app.features.cache.opening import open_cache  # noqa: PLC0415 - the parent of the workers must not load gRPC, nor BLAKE3

    pipeline.finder = cache = open_cache(settings, pipeline.tritons, metrics)
    stack.push_async_callback(cache.close)
    return [cache.fingerprints.run()]


def _clear(settings: Settings, _: object) -> None:
    cache = settings.of(CacheSettings).cache
    if not cache:
        raise CommandError(f"there is no cache: {PREFIX}CACHE is empty")
    if cache == "memory":
        marker = Path(settings.model_repository) / CLEARED
        try:
            marker.touch()
        except OSError as error:
            raise CommandError(f"{marker}: {error.strerror}; a restart of the gateway empties its memory, too") from error
        say("within a second, no worker uses the results in its memory any more")
        return
    if lacking := extras.lack("redis", f"{PREFIX}CACHE", _EXTRAS):
        raise CommandError(f"{lacking}; {extras.command('redis')}")
    from app.features.cache import redis_store  # noqa: PLC0415 - an extra

    try:
        asyncio.run(redis_store.clear(cache))
    except (ValueError, ConnectionError) as error:
        raise CommandError(f"{PREFIX}CACHE: {error}") from error
    say("Redis has no cached results any more")


FEATURE = Feature(
    check=_check,
    extras=_EXTRAS,
    needs=_needs,
    files=[
        ("cache", "cache", _open_redis, "the URL is that of redis-py, such as redis://localhost:6379/0"),
        ("cache_key", "cache_key_file", memory.read_secret_of, "head -c 32 /dev/urandom > FILE; chmod 600 FILE"),
    ],
    share=_share,
    open=_open,
    commands={"cache": _clear},
)
