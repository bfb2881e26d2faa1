"""Rules for settings that their types cannot express, including rules for combinations."""

import re
from contextlib import suppress
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit

from app.expected import quoted
from app.settings.schema import DIALECTS, MIN_AGE_SECONDS, PREFIX, Settings, SettingsError
from app.settings.task_models import task_models

_SOCKET = re.compile(r"unix:/[^\s,]+")
_ADDRESS = re.compile(r"(?:dns:///)?(?:[^\s:/@\[\]]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
_MAX_PORT = 65535
# `*`, or a name whose last label begins with a letter, which excludes IP addresses.
_URL_HOST = re.compile(r"(?:\*|(?:\*\.)?(?:[a-z0-9_-]+\.)*[a-z][a-z0-9-]*)(?::(?P<port>[0-9]{1,5}))?")

_ZMQ_ADDRESS = re.compile(r"ipc:///[^\s@?#]{1,95}|tcp://(?P<host>localhost|[0-9.]+|\[[0-9A-Fa-f:]+\]):(?P<port>[1-9][0-9]{0,4})")
_PRIVATE = [ip_network(text) for text in ("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1", "fc00::/7")]

# As browsers write it: without the scheme's usual port, and with ASCII names only.
_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?:[a-z0-9_-]+(?:\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")
_USUAL_PORTS = {("http", "80"), ("https", "443")}


def check(settings: Settings) -> None:
    """Raise SettingsError, which names the setting, if one breaks a rule."""
    _check_addresses(settings)
    if settings.triton_tls_folder and not settings.triton_endpoints:
        raise SettingsError(f"{PREFIX}TRITON_TLS_FOLDER: {PREFIX}TRITON_ENDPOINTS names no Triton, and the embedded one has no TLS")
    _check_loading(settings)
    _check_frigate(settings.frigate_zmq)
    listens_on_port = not (settings.socket or settings.instances)
    if listens_on_port and not settings.triton_endpoints and 0 < settings.triton_ports in {settings.port, settings.port - 1}:
        raise SettingsError(f"{PREFIX}PORT: {settings.port} is one of the two ports from {PREFIX}TRITON_PORTS on")
    try:
        _ = settings.trusted_networks
    except ValueError as error:
        raise SettingsError(f"{PREFIX}TRUSTED_PROXIES: Expected addresses or networks such as 10.0.0.0/8; {error}") from error
    try:
        task_models(settings)
    except ValueError as error:
        raise SettingsError(f"{PREFIX}TASK_MODELS: {error}") from error
    _check_url_hosts(settings)
    _check_origins(settings)
    for name in settings.dialect_names:
        if name not in DIALECTS:
            known = ", ".join(DIALECTS)
            raise SettingsError(f"{PREFIX}DIALECTS: Expected some of {known}, or none{quoted(name)}")
    _check_database(settings.database_url)
    if 0 < (age := settings.worker_max_age_seconds) < MIN_AGE_SECONDS:
        raise SettingsError(f"{PREFIX}WORKER_MAX_AGE_SECONDS: Expected 0, or at least {MIN_AGE_SECONDS} seconds; got {age}")


def _check_addresses(settings: Settings) -> None:
    # gRPC accepts a URL, but cannot resolve it.
    if not settings.triton_endpoints:
        return
    addresses = [address.strip() for address in settings.triton_endpoints.split(",")]
    for given in (address for address in addresses if not _SOCKET.fullmatch(address)):
        address = _ADDRESS.fullmatch(given)
        if address is None or not 0 < int(address["port"]) <= _MAX_PORT:
            raise SettingsError(
                f"{PREFIX}TRITON_ENDPOINTS: Expected host:port of Triton's gRPC endpoint, "
                "such as triton.example.org:8001 or [2001:db8::7]:8001, without http://, or unix:/path, or dns:///name:port; "
                f"several with commas{quoted(given)}"
            )
    if len(set(addresses)) < len(addresses):
        raise SettingsError(f"{PREFIX}TRITON_ENDPOINTS: an address is there twice")


def _check_frigate(address: str) -> None:
    if not address:
        return
    found = _ZMQ_ADDRESS.fullmatch(address)
    with suppress(ValueError):  # no IP address
        host = found and found["host"] and ip_address(found["host"].strip("[]").replace("localhost", "127.0.0.1"))
        if found and int(found["port"] or 1) <= _MAX_PORT and (not host or any(host in network for network in _PRIVATE)):
            return
    raise SettingsError(
        f"{PREFIX}FRIGATE_ZMQ: Expected tcp://address:port with a loopback or private IP address of this machine, such as "
        f"tcp://127.0.0.1:5555, or ipc:///path{quoted(address)}"
    )


def _check_loading(settings: Settings) -> None:
    if settings.loaded_models and settings.triton_endpoints and not settings.triton_loads_models:
        raise SettingsError(f"{PREFIX}LOADED_MODELS: it needs {PREFIX}TRITON_LOADS_MODELS, or the embedded Triton")
    if settings.loaded_models and settings.triton_ports and not settings.triton_endpoints:
        raise SettingsError(f"{PREFIX}LOADED_MODELS: with {PREFIX}TRITON_PORTS, the embedded Triton loads no models while it runs")


def _check_database(url: str) -> None:
    # The URL is not quoted, because it may contain a password.
    with suppress(ValueError):  # of a port, or of an IPv6 address
        address = urlsplit(url)
        if not url or ((address.hostname or "host=" in address.query) and address.port != 0 and address.path.strip("/")):
            return
    raise SettingsError(
        f"{PREFIX}DATABASE_URL: Expected host, perhaps a port, and the name of a database: postgresql://nereid@db.example.org/nereid"
    )


def _check_url_hosts(settings: Settings) -> None:
    for given in settings.url_host_patterns:
        pattern = _URL_HOST.fullmatch(given)
        if pattern is None or not 0 < int(pattern["port"] or 443) <= _MAX_PORT:
            raise SettingsError(
                f"{PREFIX}URL_HOSTS: Expected names of hosts such as images.example.org, *.example.org or images.example.org:8443, "
                f"or *, without https:// and path; several with commas{quoted(given)}"
            )


def _check_origins(settings: Settings) -> None:
    if settings.allowed_origins == ("*",):
        return
    for origin in map(_ORIGIN.fullmatch, settings.allowed_origins):
        if origin is None or not 0 < int(origin["port"] or 443) <= _MAX_PORT or origin.group("scheme", "port") in _USUAL_PORTS:
            raise SettingsError(
                f"{PREFIX}CORS_ORIGINS: Expected origins as browsers send them, such as https://app.example.org or "
                "http://localhost:3000, without path and without :443 or :80; several with commas; or only *"
            )
