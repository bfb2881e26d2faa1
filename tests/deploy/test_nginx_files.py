"""The file for NGINX against the gateway: limits, names of errors, and paths; what NGINX does with it is in `test_nginx.py`."""

import re

from app import server
from app.api.admin import MAX_MODEL_BYTES, ROUTES
from app.api.context import PAUSE_SECONDS
from app.api.dialects.kserve import control
from app.api.receiving.client_watch import body_too_large
from app.api.routes import VERSION, ModelRoute
from app.errors import BodyTooLarge, MalformedRequest
from app.settings.schema import DIALECTS, Settings
from tests.deploy.needs import INSTANCES, PATHS
from tests.nginx import SHIPPED

TEXT = (SHIPPED / "nereid.conf").read_text(encoding="utf-8")
PATTERNS: list[str] = re.findall(r"location ~ (.+?) \{\n", TEXT)
OWN, SEVERAL, RECORDS, CHANGES, OTHERS = PATTERNS[:5]
"""For one image, for several, for what search keeps, for changes on this machine, for dialects."""


def sample(path: str) -> str:
    return re.sub(r"\{\w+:str\}", "tiny", path.replace("{version:int}", "3"))


def seconds(directive: str, text: str = TEXT) -> float:
    (value,) = re.findall(rf"^ {{4}}{directive} ([^;]+)s;", text, re.MULTILINE)
    return float(value)


def test_limits_and_names_of_errors_are_those_of_the_gateway() -> None:
    """And NGINX closes idle connections first: otherwise it could send a request on one that the gateway is closing."""
    settings = Settings()
    limits = (settings.max_body_bytes, settings.max_batch_bytes, MAX_MODEL_BYTES)
    sizes = (settings.max_file_size_mb, settings.max_batch_size_mb, MAX_MODEL_BYTES >> 20)

    assert re.findall(r"client_max_body_size (\S+);", TEXT) == [f"{size:g}m" for size in sizes]
    assert all(f' "{body_too_large(limit).detail.removeprefix("the limit is ")}";' in TEXT for limit in limits)
    assert seconds("client_body_timeout") == PAUSE_SECONDS
    assert seconds("proxy_read_timeout") > settings.max_timeout_seconds > settings.timeout_seconds
    assert re.findall(r"proxy_next_upstream_tries (\d+);", TEXT) == [str(len(INSTANCES) + 1), str(len(INSTANCES))]
    for error in (BodyTooLarge, MalformedRequest):
        assert f"    {error.status} {error.code};\n" in TEXT
        assert f'    {error.status} "{error.title}";\n' in TEXT
    text = (SHIPPED / "upstream.conf").read_text(encoding="utf-8")
    assert seconds("keepalive_timeout", text) * 1000 < server._HEADER_MILLISECONDS  # noqa: SLF001


def test_each_path_at_which_a_model_is_asked_is_public_with_its_limit() -> None:
    for path, (handler, *_) in PATHS:
        location = next((pattern for pattern in (OWN, SEVERAL, RECORDS, OTHERS) if re.search(pattern, sample(path))), None)
        assert (location is None) == (path in {"/health", "/v1/auth"} or bool(re.search(CHANGES, sample(path)))), path
        assert (location == SEVERAL) == (isinstance(handler, ModelRoute) and handler.takes == "images") or path == "/predict", path
    assert all(re.search(OTHERS, f"/{name}/anything") for name in DIALECTS)


def test_models_are_changed_at_the_location_that_only_this_machine_has() -> None:
    """Also below a dialect's name, whose location takes everything else: the first location that matches counts."""
    changes = {sample(prefix + path) for path in control.paths for prefix in ("", "/kserve")}
    changes |= {sample(prefix + path) for prefix in ("", VERSION) for route in ROUTES for path in route.paths}

    assert re.findall(r"location ~ (.+?) \{\n(?:(?!    \}\n).+\n)*? +limit_except", TEXT) == [CHANGES]
    for path in changes:
        assert next(pattern for pattern in PATTERNS if re.search(pattern, path)) == CHANGES
