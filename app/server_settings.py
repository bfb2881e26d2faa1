"""Settings of the HTTP server: where it listens, whom it trusts, and its processes."""

from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Annotated

import msgspec
from msgspec import Meta

MIN_AGE_SECONDS = 60
"""Granian renews no worker sooner."""

Port = Annotated[int, Meta(ge=1, le=65535)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the settings that the HTTP server needs."""

    host: Annotated[str, Meta(description="Address the API listens on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port the API listens on.")] = 4603
    socket: Annotated[
        str, Meta(max_length=100, description="Unix socket the API listens on, instead of host and port. Empty: none.")
    ] = ""
    socket_mode: Annotated[
        str, Meta(pattern="^[0-7]{3}$", description="Permissions of the unix sockets, octal; the proxy must be allowed to write.")
    ] = "660"
    instances: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Instances of the API that `serve` runs, each on a unix socket `nereid-N.sock` in the folder of "
            "sockets, for a proxy in front of them. 0: one, on host and port.",
        ),
    ] = 0
    socket_folder: Annotated[str, Meta(max_length=80, description="Folder of the instances' sockets.")] = "run"
    trusted_proxies: Annotated[
        str,
        Meta(
            description="Addresses and networks of proxies, separated by commas, whose `X-Real-IP` is logged as the client's "
            "address; that of a proxy on a unix socket always is. Empty: none."
        ),
    ] = ""
    api_keys_file: Annotated[
        str, Meta(description="TOML file of the API keys, read again when it changes. Empty: no key is needed.")
    ] = ""
    workers: Annotated[
        int,
        Meta(
            ge=0, le=256, description="API processes, per instance; 0: one per core that may be used, also by a container's quota."
        ),
    ] = 0
    worker_max_age_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=10**8,
            description="Age at which an API process is replaced, at least 60 seconds; up to a tenth more or less. 0: never.",
        ),
    ] = 0
    worker_max_memory_mb: Annotated[
        int, Meta(ge=0, le=1 << 20, description="Resident memory at which an API process is replaced, MiB. 0: never.")
    ] = 0
    drain_delay_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=600,
            description="After SIGTERM, time for which `/readyz` answers 503 before new connections are refused, seconds.",
        ),
    ] = 1.0
    decode_threads: Annotated[
        int, Meta(ge=1, le=256, description="Threads per worker that decode images, request bodies and raw model outputs.")
    ] = 2

    @property
    def trusted_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of trusted proxies.

        Raises:
            ValueError: One is neither an address nor a network.
        """
        named = filter(None, map(str.strip, self.trusted_proxies.split(",")))
        return tuple(ip_network(name) for name in named)
