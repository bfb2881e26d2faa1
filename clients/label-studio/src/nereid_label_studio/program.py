"""The ML backend: the paths that Label Studio calls, each answered by questions to the gateway.

Source: label_studio/ml/api_connector.py of Label Studio (the client); label_studio_ml/api.py in label-studio-ml-backend.
"""

import argparse
import logging
import os
import socket
from base64 import b64decode
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any

import httpx
import msgspec
from granian import Granian
from granian.constants import Interfaces
from litestar import Litestar, Request, get, post
from litestar.datastructures import State
from litestar.exceptions import ClientException, HTTPException, NotAuthorizedException
from litestar.params import JSONBody
from litestar.types import Scope
from msgspec import Meta

from nereid_label_studio.labeling import Control, read
from nereid_label_studio.regions import Json, regions_of
from nereid_label_studio.studio import ONCE, Studio, check_url

_MAX_TASKS = 64
"""Of more tasks, only the first gets a prediction: then Label Studio requests each task separately."""
_MAX_BODY_BYTES = 128 << 20
_IN_FLIGHT = 4
"""Images of one request that the gateway is asked about at the same time."""
_UNNAMED = "$undefined$"
"""Key of data that was imported into Label Studio without a name."""
_SMALL_IMAGE: dict[str, Any] = {"json": {"image": "R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw=="}}
"""A GIF of one pixel, which shows which model answers."""

AnyRequest = Request[Any, Any, Any]


class Task(msgspec.Struct):
    """A task, whose data has an image at the key that the labeling configuration says."""

    data: dict[str, Any]


class Prediction(msgspec.Struct):
    """A request for the regions in the images of tasks."""

    tasks: Annotated[list[Task], Meta(min_length=1)]
    label_config: Annotated[str, Meta(max_length=1 << 16)]


class Setup(msgspec.Struct):
    """A request for the model of a project."""

    label_config: Annotated[str, Meta(max_length=1 << 16)] | None = msgspec.field(default=None, name="schema")


@get("/health", sync_to_thread=True)
def health(state: State) -> dict[str, str]:
    """Report whether the gateway is ready."""
    _ask(state.gateway, "GET", "/readyz")
    return {"status": "UP", "model_class": "Nereid"}


@post("/setup", status_code=200, sync_to_thread=True)
def setup(data: JSONBody[Setup], request: AnyRequest, state: State) -> dict[str, str]:
    """Return the model of a project. Label Studio requests new predictions when it changes."""
    questions = [control.question for control in read(data.label_config or "<View/>")] or [("/detect", {})]
    key = _key_of(request)
    return {
        "model_version": _versions([_ask(state.gateway, "POST", *question, headers=key, **_SMALL_IMAGE) for question in questions])
    }


@get("/versions", sync_to_thread=True)
def versions(request: AnyRequest, state: State) -> dict[str, list[str]]:
    """List the models of all projects: Label Studio does not say for which project it asks."""
    models = _ask(state.gateway, "GET", "/models", headers=_key_of(request))["models"]
    tasks = {"detection", "segmentation", "pose", "obb"}
    usable = (model for model in models if model["state"] == "ready" and model["task"] in tasks)
    return {"versions": [f"{model['name']}:{model['version']}" for model in usable]}


@post("/predict", status_code=200, sync_to_thread=True)
def predict(data: JSONBody[Prediction], request: AnyRequest, state: State) -> dict[str, list[Json]]:
    """Find the regions in the images of tasks. A task that fails has an `error`; if it is the only one, so does the request."""
    controls = read(data.label_config)
    if not controls:
        raise ClientException("the labeling configuration has no control for shapes on an Image with a value such as $image")
    key = _key_of(request)
    _ask(state.gateway, "GET", "/models", headers=key)  # checks the key before anything is fetched from Label Studio
    tasks = data.tasks if len(data.tasks) <= _MAX_TASKS else data.tasks[:1]
    with ThreadPoolExecutor(_IN_FLIGHT) as threads:
        results = list(threads.map(partial(_predict_one, state, key, controls), tasks))
    if len(results) == 1 and isinstance(results[0], HTTPException):
        raise results[0]
    return {"results": [{"error": result.detail} if isinstance(result, HTTPException) else result for result in results]}


@post("/webhook")
async def webhook() -> dict[str, str]:
    """Ignore the events of a project: the gateway does not train models."""
    return {"status": "ok"}


def _predict_one(state: State, key: Mapping[str, str], controls: Sequence[Control], task: Task) -> Json | HTTPException:
    """Return the prediction for a task, or its error. Label Studio logs one without `result`, and continues with the next one."""
    try:
        text = task.data.get(controls[0].key) or task.data.get(_UNNAMED)
        if not isinstance(text, str):
            raise ClientException("the task has no image where the labeling configuration says")
        image = state.studio.image(text.strip())
        answers = [_ask(state.gateway, "POST", *control.question, headers=key, **image) for control in controls]
        regions = [region for control, answer in zip(controls, answers, strict=True) for region in regions_of(control, answer)]
    except HTTPException as error:
        return error
    score = sum(region["score"] for region in regions) / max(len(regions), 1)
    return {"model_version": _versions(answers), "score": round(score, 4), "result": regions}


def _versions(answers: Sequence[Json]) -> str:
    return ", ".join(dict.fromkeys(f"{answer['model']['name']}:{answer['model']['version']}" for answer in answers))


def _key_of(request: AnyRequest) -> dict[str, str]:
    """Return the gateway's key: its ID and SECRET are the user and the password that are set with the backend."""
    scheme, _, encoded = request.headers.get("Authorization", "").partition(" ")
    if not scheme:
        return {}
    try:
        credential = b64decode(encoded, validate=True).decode("ascii").replace(":", ".", 1)
    except ValueError:  # not base64, or not ASCII
        credential = ""
    if scheme.lower() != "basic" or not credential or not credential.isprintable():
        raise NotAuthorizedException("expected Basic authentication with the ID and the SECRET of a key of the gateway")
    return {"Authorization": f"Bearer {credential}"}


def _ask(
    gateway: httpx.Client,
    method: str,
    path: str,
    parameters: Mapping[str, str] | None = None,
    **options: Any,  # noqa: ANN401 - httpx's
) -> Any:  # noqa: ANN401 - any JSON
    """Return the gateway's answer, or raise its error."""
    try:
        response = gateway.request(method, path, params=parameters, **options)
    except httpx.RequestError as error:
        raise HTTPException("the gateway at NEREID_URL does not answer", status_code=502) from error
    kind = response.headers.get("Content-Type", "").partition(";")[0]
    if response.is_success and kind == "application/json":
        return response.json()
    is_problem = kind == "application/problem+json"
    detail = response.json()["detail"] if is_problem else f"NEREID_URL answered with status {response.status_code}"
    raise HTTPException(detail, status_code=response.status_code if response.is_error else 502)


async def _log(exception: Exception, scope: Scope) -> None:
    if not isinstance(exception, HTTPException):
        logging.getLogger(__name__).error("the answer to %s failed", scope["path"], exc_info=exception)


def create_app(gateway: httpx.Client, studio: Studio) -> Litestar:
    """Make the application from what it calls."""
    return Litestar(
        [health, setup, versions, predict, webhook],
        state=State({"gateway": gateway, "studio": studio}),
        request_max_body_size=_MAX_BODY_BYTES,
        openapi_config=None,
        logging_config=None,
        after_exception=[_log],
    )


def from_environment() -> Litestar:
    """Make the application from the environment; raise ValueError if a variable is not valid."""
    url = os.environ.get("NEREID_URL", "http://127.0.0.1:4603")
    check_url("NEREID_URL", url)
    gateway = httpx.Client(base_url=url, timeout=httpx.Timeout(60, connect=5), limits=ONCE)
    return create_app(gateway, Studio(os.environ.get("LABEL_STUDIO_URL", ""), os.environ.get("LABEL_STUDIO_API_KEY", "")))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="nereid-label-studio",
        description="ML backend of Label Studio that asks Nereid, a gateway for object detection.",
        epilog="Environment: NEREID_URL, address of the gateway (default: http://127.0.0.1:4603); LABEL_STUDIO_URL and "
        "LABEL_STUDIO_API_KEY, address of Label Studio, and a token of a user, for the images that lie there.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=9090, help="port to listen on (default: %(default)s)")
    options = parser.parse_args()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    try:
        from_environment()
        # Granian takes no names, and would share a port that is in use.
        with socket.create_server((options.host, options.port), family=family) as server:
            host, port, *_ = server.getsockname()
    except (ValueError, OSError, OverflowError) as error:
        parser.error(str(error))
    target = "nereid_label_studio.program:from_environment"
    Granian(target, host, port, interface=Interfaces.ASGI, factory=True, websockets=False).serve()


if __name__ == "__main__":
    main()
