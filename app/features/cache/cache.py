"""The result cache: answers images that were sent before, and identical ones under way with one inference."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import lru_cache
from hashlib import blake2b

from blake3 import blake3

from app.features.cache import entry
from app.features.cache.fingerprints import Fingerprints
from app.features.cache.flight import Flights
from app.features.cache.instruments import Instruments
from app.features.cache.store import Store
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext, Decoded
from app.telemetry.timing import CACHE

# Hashing a larger file may take a millisecond or more.
_LARGE_BYTES = 1 << 20
# Results that wait to be stored; more are not stored.
_MAX_STORING = 64
_digest = lru_cache(256)(lambda *facts: blake2b(repr(facts).encode()).digest())


class ResultCache:
    """All that models have found in images, above their floor and before a request chooses: its parameters apply to a hit, too."""

    def __init__(  # noqa: PLR0913 - what a result depends on
        self, store: Store, fingerprints: Fingerprints, secret: bytes, common: object, metrics: Instruments, *, is_shared: bool
    ) -> None:
        """Cache results in a store, which the cache closes.

        The keys are made with a secret of at most 64 bytes, and of `common`: what all results depend on, such as the limits above
        which images are rejected. A result answers only the caller that has caused it, unless it `is_shared`.
        """
        self._store, self.fingerprints, self._secret, self._common = store, fingerprints, secret, common
        self._metrics, self._is_shared = metrics, is_shared
        self._hash_key = blake2b(digest_size=blake3.key_size, key=secret, person=b"hash of files").digest()
        self._flights = Flights()
        self.storing: set[asyncio.Task[None]] = set()

    def takes(self, spec: ModelSpec, call: CallContext) -> bool:
        """Return whether results of this model may be cached: small ones that are whole, of a known network."""
        return call.uses_cache and spec.head.may_be_cached and self.fingerprints.get(spec) != b""

    async def find(self, data: bytes, spec: ModelSpec, call: CallContext, infer: Callable[[], Awaitable[Decoded]]) -> Decoded:
        """Return what a model finds in an encoded image, as `hooks.Finder` says."""
        fingerprint = self.fingerprints.get(spec)
        call.timing.begin(CACHE)
        key = await self._key(data, spec, fingerprint, call)
        value = await self._store.get(key)
        if value is not None and (cached := entry.load(value, key, spec, self._secret)) is not None:
            self._note(call, "hit")
            self._metrics.saved.observe(cached[1])
            return cached[0]

        async def find_first() -> Decoded:
            self._note(call, "miss")
            found = await infer()
            # A model that was replaced meanwhile may have answered.
            if found.spec is spec and found.version == spec.version and len(self.storing) < _MAX_STORING:
                seconds = call.timing.stages.get("infer", 0.0) / 1e3
                value = entry.dump(found, seconds, key, self._secret)  # now: what was found may be a view of far more
                task = asyncio.create_task(self._keep(key, value, spec, fingerprint))
                self.storing.add(task)
                task.add_done_callback(self.storing.discard)
            return found

        # Only a request that names no version may get the answer of a newer one.
        decoded, is_shared = await self._flights.run(
            (key, call.is_pinned), find_first, call.deadline, (call.is_batch or bool(call.stream), call.caller.priority)
        )
        if is_shared:
            self._note(call, "shared")
        return decoded

    async def close(self) -> None:
        """Close the store. What is not stored yet is lost."""
        for task in self.storing:
            task.cancel()
        await asyncio.gather(*self.storing, return_exceptions=True)
        await self._store.close()

    def _note(self, call: CallContext, result: str) -> None:
        call.timing.lap(CACHE, result)
        self._metrics.requests.add(1, result)

    async def _keep(self, key: bytes, value: bytes, spec: ModelSpec, fingerprint: bytes) -> None:
        if await self.fingerprints.confirm(spec, fingerprint):  # otherwise another network may have given the result
            await self._store.put(key, value)

    async def _key(self, data: bytes, spec: ModelSpec, fingerprint: bytes, call: CallContext) -> bytes:
        owner = "" if self._is_shared else call.caller.name
        facts = _digest(self._common, spec.meaning, fingerprint, owner, call.allows_truncated)
        hasher = blake3(facts, key=self._hash_key)  # a third of the time of SHA-256, a sixth of that of BLAKE2b
        if len(data) > _LARGE_BYTES:
            await asyncio.to_thread(hasher.update, data)
        else:
            hasher.update(data)
        return hasher.digest()
