"""How the connection to a Triton is opened: sizes, reconnection, keep-alive, TLS."""

import grpc

from app.triton.credentials import Credentials

_OPTIONS = [
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


def open_channel(url: str, credentials: Credentials | None) -> grpc.aio.Channel:
    """Open a channel; it connects when it is used.

    Args:
        url: `host:port` of Triton's gRPC endpoint.
        credentials: For TLS; None sends everything unencrypted.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(url, options=_OPTIONS)
    tls = grpc.ssl_channel_credentials(credentials.roots, credentials.key, credentials.certificates)
    return grpc.aio.secure_channel(url, tls, options=_OPTIONS)
