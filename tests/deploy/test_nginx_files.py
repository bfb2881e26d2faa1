"""The file for NGINX against the gateway: limits, names of errors, and paths; what NGINX does with it is in `test_nginx.py`."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app import server
from app.api.admin import MAX_MODEL_BYTES, ROUTES
from app.api.context import PAUSE_SECONDS
from app.api.dialects.kserve import control
from app.api.receiving.client_watch import body_too_large
from app.api.reports.health import livez, readyz
from app.api.reports.models import model, models
from app.api.routes import VERSION, ModelRoute
from app.api.routing import ADMIN_ROUTES, routes
from app.api.search import routes as search
from app.errors import BodyTooLarge, MalformedRequest
from app.settings.schema import DIALECTS, Settings
from tests.deploy.compose import INSTANCES
from tests.deploy.needs import PATHS
from tests.nginx import SHIPPED

TEXT = (SHIPPED / "nereid.conf").read_text(encoding="utf-8")
PATTERNS: list[str] = re.findall(r"location ~ (.+?) \{\n", TEXT)
OWN, SEVERAL, RECORDS, CHANGES, OTHERS = PATTERNS[:5]
"""For one image, for several, for what search keeps, for changes on this machine, for dialects."""


def sample(path: str) -> str:
    return re.sub(r"\{\w+:str\}", "tiny", path.replace("{version:int}", "3"))


CONTROL = {sample(prefix + path) for path in control.paths for prefix in ("", "/kserve")}
ADMIN = {sample(prefix + path) for prefix in ("", VERSION) for route in ROUTES for path in route.paths}
ASKED = {sample(path) for path, _ in PATHS}
NOT_ASKED = {
    sample(prefix + path)
    for handler in (models, model, routes, livez, readyz, *ROUTES, *ADMIN_ROUTES, *search.ROUTES)
    for path in handler.paths
    for prefix in ("", VERSION)
}
EXAMPLES = {"[^/]+": "tiny", "[0-9]+": "3", "(page-assets/tiny)?": "", "/?$": "$", "^/v1/vision/": "^/v1/vision/detection$"}


def seconds(directive: str, text: str = TEXT) -> float:
    (value,) = re.findall(rf"^ {{4}}{directive} ([^;]+)s;", text, re.MULTILINE)
    return float(value)


def test_limits_and_names_of_errors_are_those_of_the_gateway() -> None:
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


def test_nginx_closes_idle_connections_before_the_gateway_does() -> None:
    """Otherwise NGINX could send a request on a connection that the gateway is closing."""
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
    assert re.findall(r"location ~ (.+?) \{\n(?:(?!    \}\n).+\n)*? +limit_except", TEXT) == [CHANGES]
    for path in ADMIN | CONTROL | {f"{path}/" for path in CONTROL}:
        assert next(pattern for pattern in PATTERNS if re.search(pattern, path)) == CHANGES


@pytest.mark.parametrize("location", PATTERNS)
@given(data=st.data())
def test_each_public_path_exists(location: str, data: st.DataObject) -> None:
    for general, example in EXAMPLES.items():
        location = location.replace(general, example)
    path = data.draw(st.from_regex(location, fullmatch=True)).rstrip()

    assert path in ASKED | CONTROL | NOT_ASKED | {"/", f"{VERSION}/"} | {f"/{name}/" for name in DIALECTS}
