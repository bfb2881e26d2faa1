"""Find the API key of a request wherever clients of a dialect put it."""

import base64
import binascii

from app.api import intake
from app.api.context import context_of
from app.api.dependencies import WorkerResources
from app.api.dialects.dialect import AnyRequest
from app.api.guards import admit_key

_HEADERS = {b"authorization", b"x-api-key"}


def has_key(request: AnyRequest) -> bool:
    """Return whether there is a key, valid or not, in the headers or the query."""
    return bool(_in_query(request)) or any(name in _HEADERS for name, _ in request.scope["headers"])


def require_key(request: AnyRequest, worker: WorkerResources, in_body: str | None = None) -> None:
    """Reject a request without a valid key, if there are keys.

    Args:
        request: Its key is in a header, as `Bearer` or as user and password, or in the query as `api_key`.
        worker: Has the keys.
        in_body: The key in the body, which counts only if there is none elsewhere.

    Raises:
        Unauthorized: There is no key, or a wrong one.
        Forbidden: The key does not have the scope `detect`.
    """
    if worker.keys is None:
        return
    headers = [(name, _to_bearer(value)) for name, value in request.scope["headers"] if name in _HEADERS]
    given = _in_query(request) or in_body
    if not headers and given:
        headers = [(b"x-api-key", given.encode())]
    admit_key(worker.keys.identify(headers), "detect", worker.keys, context_of(request.scope))


def _in_query(request: AnyRequest) -> str:
    return dict(intake.query_of(request.scope)).get("api_key", "")


def _to_bearer(authorization: bytes) -> bytes:
    """Make `Bearer ID.SECRET` of a header with the user ID and the password SECRET; leave any other as it is."""
    scheme, _, encoded = authorization.partition(b" ")
    if scheme.lower() != b"basic":
        return authorization
    try:
        return b"Bearer " + base64.b64decode(encoded.strip(), validate=True).replace(b":", b".", 1)
    except binascii.Error:
        return authorization
