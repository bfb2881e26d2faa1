"""Facts of the errors, from their classes."""

from http import HTTPStatus

from app.errors import GatewayError

_BY_CODE = {error.code: error for error in GatewayError.__subclasses__()}


def render(code: str) -> str:
    """State the status and the title of an error."""
    error = _BY_CODE[code]
    try:
        phrase = f" {HTTPStatus(error.status).phrase}"
    except ValueError:  # 499 is NGINX's
        phrase = ""
    retry = "; with `Retry-After`" if error.retry_after_seconds is not None else ""
    return f"*{error.title}* — status **{error.status}**{phrase}{retry}."
