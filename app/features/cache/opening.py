"""Open the cache of a worker."""

import os
from functools import partial
from pathlib import Path

from app import __version__
from app.embedded.folder import TritonFolder
from app.features.cache import memory, networks
from app.features.cache.cache import ResultCache
from app.features.cache.fingerprints import Fingerprints
from app.features.cache.instruments import Instruments
from app.features.cache.settings import CacheSettings
from app.features.cache.store import Store
from app.imaging.header import PixelLimits
from app.model.reference import refer_to
from app.settings.schema import Settings
from app.telemetry.metrics import Metrics
from app.triton.loading import has_loaded
from app.triton.pool import TritonPool


def open_cache(settings: Settings, pool: TritonPool, metrics: Metrics) -> ResultCache:
    """Open the cache that the settings ask for."""
    chosen, instruments = settings.of(CacheSettings), metrics.of(Instruments)
    key_file = chosen.cache_key_file
    secret = memory.read_secret_of(key_file) if key_file else b""
    descriptor = memory.open_file(chosen.memory_bytes)
    secret = secret or memory.read_secret(descriptor)
    store: Store
    if chosen.cache == "memory":
        store = memory.MemoryStore(descriptor, chosen.cache_seconds, instruments)
    else:
        from app.features.cache.redis_store import RedisStore  # noqa: PLC0415 - an extra

        os.close(descriptor)
        store = RedisStore(chosen.cache, chosen.cache_seconds, instruments)
    is_loaded = partial(has_loaded, metrics.table, pool) if settings.triton_endpoints else TritonFolder(settings).has_loaded

    def read(name: str, version: str) -> bytes:
        # Some answers may have been kept before they were found to be wrong.
        network = networks.read(Path(settings.model_repository), is_loaded, name, version)
        wrong = metrics.nonzero(metrics.wrong_episodes)
        return network and network + b" %d %d" % (wrong.get(name, 0), wrong.get(refer_to(name, version), 0))

    # Without keys, callers are groups of client addresses.
    is_shared = chosen.cache_shared or not settings.api_keys_file
    limits = PixelLimits(settings.max_pixels, settings.max_pixels_non_jpeg)
    return ResultCache(store, Fingerprints(read), secret, (__version__, limits), instruments, is_shared=is_shared)
