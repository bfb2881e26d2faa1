"""The settings, and what follows from them."""

import math
import os
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path

from app.settings.fields import SettingsFields

PREFIX = "NEREID_"
"""The prefix of environment variables: `NEREID_PORT=8080` sets `port`."""
MIN_AGE_SECONDS = 60
"""Granian's minimum age for renewing a worker."""
TRITON_SOCKET = "triton:1"
"""File name of the embedded Triton's socket: Triton adds the number of a port to the name it is given."""


class Settings(SettingsFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings, and what follows from them."""

    @property
    def sockets(self) -> list[Path | None]:
        """The socket of each instance; None for host and port."""
        if not self.instances:
            return [Path(self.socket).resolve() if self.socket else None]
        folder = self.socket_folder.resolve()
        return [folder / f"nereid-{number}.sock" for number in range(1, self.instances + 1)]

    @property
    def socket_folder(self) -> Path:
        """The folder of the instances' sockets."""
        return Path(self.socket or "run")

    @property
    def local_url(self) -> str:
        """The URL of the API on this machine if it listens on host and port."""
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # noqa: S104 - compared only
        return f"http://[{address}]:{self.port}" if ":" in address else f"http://{address}:{self.port}"

    @property
    def trusted_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of trusted proxies.

        Raises:
            ValueError: A name is neither an address nor a network.
        """
        named = filter(None, map(str.strip, self.trusted_proxies.split(",")))
        return tuple(ip_network(name) for name in named)

    @property
    def triton_folder(self) -> Path:
        """The folder of the embedded Triton's socket: each `triton_home` has one, whoever looks for it.

        It is in /dev/shm, because that is the same for all programs, unlike the temporary folder and `XDG_RUNTIME_DIR`, and because
        the path of a socket has at most 107 bytes.
        """
        home = os.fsencode(Path(self.triton_home).resolve())
        return Path("/dev/shm", f"nereid-triton-{sha256(home).hexdigest()[:12]}")  # noqa: S108 - its users check its owner

    @property
    def triton_addresses(self) -> tuple[str, ...]:
        """Endpoints (gRPC) of the Tritons in use, embedded or external: `host:port`, `unix:/path` or `dns:///name:port`."""
        named = tuple(filter(None, map(str.strip, self.triton_endpoints.split(","))))
        return named or (f"unix:{self.triton_folder / TRITON_SOCKET}",)

    @property
    def triton_address(self) -> str:
        """The gRPC endpoint of the first Triton, such as the embedded one."""
        return self.triton_addresses[0]

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """Metrics endpoints of the Tritons, as far as they are known."""
        return tuple(filter(None, self.triton_metrics_url.split(",")))

    @property
    def control_key_path(self) -> Path | None:
        """The file with the key of Triton's restricted protocols; None if they are not restricted."""
        return Path(self.triton_control_key_file) if self.triton_control_key_file else None

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body, in bytes."""
        return int(self.max_file_size_mb * 2**20)

    @property
    def max_batch_bytes(self) -> int:
        """Maximum size of the body of a request with several images, in bytes."""
        return int(self.max_batch_size_mb * 2**20)

    @property
    def cache_memory_bytes(self) -> int:
        """Size of the results that are cached in the memory of this host, in bytes."""
        return self.cache_mb << 20 if self.cache == "memory" else 0

    @property
    def max_pixels(self) -> int:
        """Maximum size of an image, in pixels."""
        return int(self.max_megapixels * 1e6)

    @property
    def max_pixels_non_jpeg(self) -> int:
        """Maximum size of an image that cannot be decoded at a reduced size, in pixels."""
        return min(self.max_pixels, int(self.max_megapixels_non_jpeg * 1e6))

    @property
    def dialect_names(self) -> list[str]:
        """The enabled dialects, each once."""
        return [] if self.dialects == "none" else list(dict.fromkeys(filter(None, map(str.strip, self.dialects.split(",")))))

    @property
    def trusted_origin(self) -> tuple[str, str] | None:
        """URL of the trusted origin, which may use http and private addresses, and the file of its token; None if there is none."""
        return (self.label_studio_url, self.label_studio_token_file) if self.label_studio_url else None

    @property
    def url_host_patterns(self) -> tuple[str, ...]:
        """Patterns of the hosts from which images may be fetched, in lower case."""
        return tuple(filter(None, map(str.strip, self.url_hosts.lower().split(","))))

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Origins whose pages may call the API, in lower case as browsers send them."""
        return tuple(filter(None, map(str.strip, self.cors_origins.lower().split(","))))

    @property
    def drain_seconds(self) -> int:
        """Maximum time for requests in progress to end: the limits of bodies and deadlines, plus a margin."""
        return math.ceil(self.body_seconds + max(self.timeout_seconds, self.max_timeout_seconds)) + 5


class SettingsError(Exception):
    """The environment does not contain valid settings; the message names the variable."""
