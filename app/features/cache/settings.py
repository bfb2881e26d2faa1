"""The settings of the cache, and its command."""

from typing import Annotated

import msgspec
from msgspec import Meta

from app.feature import Command, Declaration
from app.settings.schema import Settings


class CacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where results are cached, and for how long."""

    cache: Annotated[
        str, Meta(pattern=r"^(memory|(rediss?|unix)://.+)?$", title="memory, or a URL such as redis://redis:6379/0")
    ] = ""
    """Where results are cached for identical images: `memory`, shared by all workers of the host, or the URL of a Redis or Valkey,
    `redis://host:6379/0` or `rediss://` with TLS. Empty: nowhere."""
    cache_mb: Annotated[int, Meta(ge=1, le=1 << 16)] = 64
    """Size of the cache in memory, MiB."""
    cache_seconds: Annotated[int, Meta(ge=1, le=10**8)] = 3600
    """Time after which a cached result is not used any more, seconds."""
    cache_shared: bool = False
    """Whether cached results answer all API keys. Then a caller can find out whether somebody has sent an image before."""
    cache_key_file: str = ""
    """File with a secret of at least 32 bytes, from which the keys of the cache are made; the hosts that share a Redis need the
    same one. Empty: a new secret at each start."""

    @property
    def memory_bytes(self) -> int:
        """Size of the results that are cached in the memory of this host, in bytes."""
        return self.cache_mb << 20 if self.cache == "memory" else 0


def _is_used(settings: Settings) -> bool:
    chosen = settings.of(CacheSettings)
    return bool(chosen.cache or chosen.cache_key_file)  # a file that cannot be read is reported anyway


_ACTION = "action", {"choices": ["clear"], "help": "what to do"}
DECLARATION = Declaration(
    settings=CacheSettings,
    before="dialects",
    is_used=_is_used,
    commands=[Command("cache", "let all cached results be forgotten: nereid cache clear", "database", [_ACTION])],
    words=["api_cache_", "cache_key", r"\bCACHE\b", "(?i:x-cache)", "cache-cleared"],
    named_in=["api/admission/cors.py", "api/admission/middleware.py", "resilience/last_valid.py", "telemetry/timing.py"],
)
