"""How connections to a Triton are opened: sizes, reconnection, keep-alive, TLS."""

import grpc

from app.triton.credentials import Credentials

_OPTIONS: list[tuple[str, int | str]] = [
    # gRPC's default limit is 4 MiB, less than one FP32 image.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC's default back-off grows to two minutes. The minimum is also the time a connection attempt may take.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A connection breaks when the other host has confirmed nothing for three seconds, instead of a quarter of an hour. Linux
    # does that if keep-alive is on; pings more often than each five minutes would make Triton close the connection.
    ("grpc.keepalive_time_ms", 310_000),
    ("grpc.keepalive_timeout_ms", 3000),
    # A proxy in the environment is for the web, not for an inference server.
    ("grpc.enable_http_proxy", 0),
]


def open_channels(address: str, credentials: Credentials | None, host: str, connections: int) -> list[grpc.aio.Channel]:
    """Open channels to one Triton, each with a connection of its own; they connect when they are used.

    Args:
        address: `host:port` of its gRPC endpoint.
        credentials: For TLS; None sends everything unencrypted.
        host: The host that its certificate must name; empty: that in the address.
        connections: How many channels.
    """
    options = list(_OPTIONS)
    if connections > 1:  # channels to one address would share a connection
        options.append(("grpc.use_local_subchannel_pool", 1))
    if credentials is None:
        return [grpc.aio.insecure_channel(address, options=options) for _ in range(connections)]
    if host:
        options.append(("grpc.ssl_target_name_override", host))
    tls = grpc.ssl_channel_credentials(credentials.roots, credentials.key, credentials.certificates)
    return [grpc.aio.secure_channel(address, tls, options=options) for _ in range(connections)]
