"""HTTP to servers on this machine."""

import socket
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from urllib.parse import urlsplit


def get_status(url: str, seconds: float, unix_socket: Path | None = None) -> int | None:
    """Return the status of `get`, or None without a response."""
    answer = get(url, seconds, unix_socket)
    return None if answer is None else answer[0]


def get(url: str, seconds: float, unix_socket: Path | None = None, key: str = "") -> tuple[int, str] | None:
    """GET an http URL without any proxy, at most so long in each step; return status and text, or None without a response."""
    parts = urlsplit(url)
    connection = HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
    try:
        if unix_socket is not None:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(seconds)
            connection.sock.connect(str(unix_socket))
        connection.request("GET", parts.path or "/", headers={"X-API-Key": key} if key else {})
        response = connection.getresponse()
        return response.status, response.read().decode(errors="replace")
    except (OSError, HTTPException):
        return None
    finally:
        connection.close()
