"""API keys: the lookup of a credential in a TOML file, which has one table per key, named after the key's id.

    [camera-1]
    sha256 = ["<SHA-256 of the secret, in hex>"]   # two during a rotation of the secret
    scopes = ["detect"]                            # what the key may do: detect, search, ingest, health, admin
    tenant = "north"                               # optional: whose indexed images it searches and adds to
    share = 0.25                                   # optional: guaranteed fraction of a model's requests and time
    priority = "high"                              # optional: high, normal or low; what waits for a higher one comes first

A credential is `id.secret`. The file contains only hashes; an unsalted SHA-256 is enough for secrets of 256 random bits.
"""

import hashlib
import hmac
import re
import secrets
import tomllib
from collections.abc import Sequence
from functools import partial
from math import fsum
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from app.errors import Unauthorized
from app.resilience import last_valid
from app.resilience.fairness import ANYBODY, HIGH, LOW, NORMAL, Caller

Scope = Literal["detect", "search", "ingest", "health", "admin"]
"""Permission of a key. `detect`: run and list models and routes; `search`: search indexed images; `ingest`: index and delete
images; `health`: health, metrics; `admin`: change models and routes, and the model of indexed images."""

_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_ID_RULE = "a key's id has 1 to 64 letters, digits, '_' or '-'"
_TABLE_RULE = (
    "expected sha256 (one or two, in hex, as a list), scopes (a list of detect, search, ingest, health and admin), share (0 to 1, "
    "optional), priority (high, normal or low, optional), tenant (1 to 64 letters, digits, '_' or '-', optional)"
)
_PRIORITIES = {"high": HIGH, "normal": NORMAL, "low": LOW}
_SECRET_BYTES = 32


class ApiKey(NamedTuple):
    """A key as read from the file."""

    id: str
    digests: tuple[bytes, bytes]
    scopes: frozenset[Scope]
    caller: Caller
    tenant: str = ""


class KeysError(Exception):
    """The file of API keys or an id is invalid. The message names the position and never quotes the file."""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    sha256: Annotated[list[Annotated[str, Meta(pattern=r"\A[0-9a-fA-F]{64}\Z")]], Meta(min_length=1, max_length=2)]
    scopes: Annotated[frozenset[Scope], Meta(min_length=1)]
    share: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    priority: Literal["high", "normal", "low"] = "normal"
    tenant: Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,64}\Z")] = ""


class ApiKeys:
    """The keys in a file, which is read again when it changes; while it is invalid, the last valid keys of the host are used."""

    def __init__(self, path: Path) -> None:
        self._file = last_valid.WatchedFile("api_keys", path, partial(load, path))
        # Used for unknown ids, so that the comparison takes the same time.
        self._nobody = ApiKey("", (secrets.token_bytes(_SECRET_BYTES), secrets.token_bytes(_SECRET_BYTES)), frozenset(), ANYBODY)

    def identify(self, headers: Sequence[tuple[bytes, bytes]]) -> ApiKey:
        """Return the key in the headers for keys of a request; raise Unauthorized for none, more than one, or a wrong one."""
        key = self.find(_credential(headers))
        if key is None:
            raise Unauthorized("the API key is not valid; send it as `nereid key` printed it, ID.SECRET")
        return key

    def find(self, credential: bytes) -> ApiKey | None:
        """Return the key of a credential, `id.secret`, or None, in a time that does not tell which ids exist."""
        id_, _, secret = credential.partition(b".")
        key = self._file.tables.get(id_.decode("latin-1"), self._nobody)
        digest = hashlib.sha256(secret).digest()
        matches = [hmac.compare_digest(digest, known) for known in key.digests]
        return key if any(matches) else None


def load(path: Path) -> dict[str, ApiKey]:
    """Read a file of keys, or recall the last valid ones of this host, by id; raise KeysError if there are none."""
    return last_valid.load("api_keys", str(path), partial(_read, path), dict[str, ApiKey], KeysError)


def _read(path: Path) -> dict[str, ApiKey]:
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise KeysError(f"{path}: {error.strerror}") from error
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError; the text before the position may quote the file
        raise KeysError(f"{path} is not valid TOML: {str(error).rpartition('(')[2].rstrip(')')}") from None
    keys = {id_: _to_key(path, id_, table) for id_, table in document.items()}
    shared = fsum(key.caller.fraction for key in keys.values() if key.caller.has_share)
    if shared >= 1:
        raise KeysError(f"{path}: the shares of all keys add up to 1 or more")
    if not keys:  # an editor or a full disk has truncated it
        raise KeysError(f"{path} has no key")
    others = {id_: key for id_, key in keys.items() if not key.caller.has_share}
    others = {id_: key._replace(caller=key.caller._replace(fraction=1 - shared)) for id_, key in others.items()}
    return {**keys, **others}


def create(id_: str) -> tuple[str, str]:
    """Create a key: return its credential, `id.secret`, and the table for the file; raise KeysError for an invalid id."""
    if not _ID.fullmatch(id_):
        raise KeysError(_ID_RULE)
    secret = secrets.token_urlsafe(_SECRET_BYTES)
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return f"{id_}.{secret}", f'[{id_}]\nsha256 = ["{digest}"]\nscopes = ["detect"]  # also search, ingest, health, admin'


def _to_key(path: Path, id_: str, table: object) -> ApiKey:
    # The messages never quote the file: it may contain a pasted credential.
    if not _ID.fullmatch(id_):
        raise KeysError(f"{path}: {_ID_RULE}")
    try:
        checked = msgspec.convert(table, _Table)
    except msgspec.ValidationError:
        raise KeysError(f"{path}: [{id_}]: {_TABLE_RULE}") from None
    digests = [bytes.fromhex(digest) for digest in checked.sha256]
    caller = Caller(id_, checked.share, checked.share > 0, _PRIORITIES[checked.priority])
    return ApiKey(id_, (digests[0], digests[-1]), checked.scopes, caller, checked.tenant)


def _credential(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    if len(headers) != 1:
        raise Unauthorized("send one API key, as `Authorization: Bearer ID.SECRET` or `X-API-Key: ID.SECRET`")
    name, value = headers[0]
    if name == b"x-api-key":
        return value
    scheme, _, credential = value.partition(b" ")
    if scheme.lower() != b"bearer":
        raise Unauthorized("the Authorization header has another scheme than Bearer; send `Authorization: Bearer ID.SECRET`")
    return credential.strip()
