"""Checks of a running Triton: reachability, version, extensions and shared memory."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from app.doctor import inference, model
from app.doctor.consistency import KEY_FIX
from app.doctor.finding import Finding, failure, ok, warning
from app.embedded.folder import Device, TritonFolder, has_gpu
from app.embedded.install import has_gpu_environment
from app.embedded.server import EmbeddedTriton
from app.errors import DeadlinePassed, GatewayError
from app.host import ports
from app.host.program import CommandError
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline.probe import run_probe
from app.settings.schema import PREFIX, Settings
from app.triton import credentials
from app.triton.client import TritonClient
from app.triton.config_file import unloadable_models
from app.triton.credentials import CredentialsError
from app.triton.membership import DNS_PREFIX, Target
from app.triton.server_info import ModelState, ServerInfo
from app.triton.shared_memory import SHM, Arena
from app.triton.status import ModelDied, own_message

_EXTENSIONS = {
    "model_configuration": "the formats of models are read from their configs",
    "schedule_policy": "each request brings its deadline",
    "statistics": "batches and queues are counted",
}
_TRIAL_BYTES = 4096


class Examination(NamedTuple):
    """Findings about Triton, and results that other checks need."""

    findings: list[Finding]
    maps_memory: bool
    """Whether tensors may use this machine's shared memory."""
    spec: ModelSpec | None = None
    """Spec of the default model; None if unknown."""
    lacks_model: bool = False
    """Whether this Triton answers, but does not have the default model."""


async def examine(target: Target, settings: Settings) -> Examination:
    """Examine a Triton and its default model."""
    is_here = is_on_this_machine(target.address)
    try:
        if not settings.triton_endpoints:
            TritonFolder(settings).check()
        tls = credentials.load(settings.triton_tls_folder)
    except CredentialsError:  # reported by the check of the files
        return Examination([], is_here)
    except CommandError as error:
        text, _, fix = str(error).partition("; ")
        return Examination([failure("triton", text, fix), *model.check_file(settings)], is_here)
    client = TritonClient(
        target.address,
        settings.control_key_path,
        credentials=tls,
        host=target.host,
        ips=target.ips,
        has_gpu=partial(has_gpu, settings),
    )
    try:
        server = await client.read_server()
        findings = [
            ok("triton", f"Triton {server.version} answers at {target.address}"),
            _check_version(server, settings),
            *_check_extensions(server),
            *([] if settings.triton_endpoints else [_check_gpu(settings)]),
        ]
        maps_memory, memory = await _check_shared_memory(client, settings, is_here=is_here)
        states, models = await _check_models(client, settings)
        state = states.get(settings.model)
        found, spec = await model.examine(client, settings, state, is_here=is_here)
        others = [name for name in states if states[name].is_ready and name != settings.model]
        dead = [finding for finding in await asyncio.gather(*(_check_process(client, name) for name in others)) if finding]
        return Examination(
            [*findings, memory, *models, *dead, *found], maps_memory, spec, lacks_model=spec is None and state is None
        )
    except GatewayError as error:
        return Examination([_unreachable(target.address, settings, error), *model.check_file(settings)], is_here)
    finally:
        await client.close()


def is_on_this_machine(address: str) -> bool:
    """Return whether a Triton's address is on this machine."""
    return address.startswith("unix:") or ports.is_this_machine(address.removeprefix(DNS_PREFIX).rpartition(":")[0].strip("[]"))


def _check_gpu(settings: Settings) -> Finding:
    """Check whether the embedded Triton runs models on the GPU for which its environment was made."""
    device = TritonFolder(settings).device or Device()
    text = f"models run on {device.gpu or 'the CPU'}, by {device.provider}"
    if device.gpu or settings.gpu == "off" or not has_gpu_environment(Path(settings.triton_home)):
        return ok("gpu", f"{text}: {device.why_cpu}" if device.why_cpu else text)
    return warning("gpu", f"{text}: {device.why_cpu}", "mend that, and start `serve` again")


def _unreachable(address: str, settings: Settings, error: GatewayError) -> Finding:
    fix = (
        f"check {PREFIX}TRITON_ENDPOINTS (host:port of its gRPC endpoint, usually 8001), the firewall, and TLS on both sides"
        if settings.triton_endpoints
        else f"start it, with the same {PREFIX}TRITON_HOME: nereid serve, or nereid triton"
    )
    reason = own_message(error).rpartition(": ")[2]  # gRPC puts the context before the reason
    return failure("triton", f"Triton at {address} does not answer: {reason}", fix)


def _check_version(server: ServerInfo, settings: Settings) -> Finding:
    if server.survives_cancel:
        return ok("triton_version", f"Triton {server.version} survives cancelled inferences")
    text = f"Triton {server.version} may crash when an inference is cancelled: what callers have given up is computed to its end"
    if not settings.triton_endpoints:
        return ok("triton_version", f"{text} (the embedded one; a Triton of your own may be newer)")
    return warning("triton_version", text, "update Triton to 2.59.1 or later: a container of release 25.07 or later")


def _check_extensions(server: ServerInfo) -> Iterator[Finding]:
    missing = [f"{name} ({reason})" for name, reason in _EXTENSIONS.items() if name not in server.extensions]
    if missing:
        text = f"this server does not speak Triton's {' and '.join(missing)}"
        fix = f"{PREFIX}TRITON_ENDPOINTS must name an NVIDIA Triton, not another server of its protocol"
        yield failure("extensions", text, fix)


async def _check_shared_memory(client: TritonClient, settings: Settings, *, is_here: bool) -> tuple[bool, Finding]:
    if settings.transport == "inline":
        text = "not used, as set"
        if not is_here:
            return False, ok("shared_memory", text)
        fix = f"unset {PREFIX}TRANSPORT, or set it to auto"
        return False, warning("shared_memory", f"{text}, though Triton runs here: pixels are copied into each request", fix)
    try:
        arena = Arena(_TRIAL_BYTES)
    except OSError as error:
        return False, _no_memory(settings, f"{SHM}: {error.strerror}", "mount a tmpfs there that this user may write to")
    try:
        await client.register(arena)
    except GatewayError as error:
        reason = own_message(error)
        if not is_here and settings.transport == "auto":
            return False, ok("shared_memory", "pixels travel in the requests: Triton does not map the memory of this machine")
        return False, _no_memory(settings, f"Triton does not map it: {reason}", _find_memory_fix(reason))
    else:
        return True, ok("shared_memory", "Triton maps this machine's shared memory")
    finally:
        await client.unregister(arena.region)
        arena.close()


def _find_memory_fix(reason: str) -> str:
    if "restricted" in reason:
        return KEY_FIX
    if "disabled" in reason:
        return "start Triton with --allow-client-shm=true"
    return "run Triton and the gateway as the same user, and in one IPC namespace: docker run --ipc=host for both"


def _no_memory(settings: Settings, text: str, fix: str) -> Finding:
    if settings.transport == "shm":
        return failure("shared_memory", f"no shared memory, and {PREFIX}TRANSPORT allows nothing else: {text}", fix)
    return warning("shared_memory", f"no shared memory, so pixels are copied into each request: {text}", fix)


async def _check_models(client: TritonClient, settings: Settings) -> tuple[dict[str, ModelState], list[Finding]]:
    try:
        states = await client.list_models()
    except GatewayError as error:
        return {}, [warning("models", f"Triton does not tell which models it has: {own_message(error)}", KEY_FIX)]
    logged = {} if settings.triton_endpoints else EmbeddedTriton(settings).load_failures()
    states |= {name: state._replace(reason=logged[name]) for name, state in states.items() if name in logged and not state.reason}
    ready = [name for name, state in states.items() if state.state == "READY"]
    text = f"{len(ready)} of the {len(states)} models in Triton's repository are ready: {', '.join(ready) or 'none'}"
    others = [name for name in states if name not in ready and name != settings.model]
    if settings.triton_endpoints:  # it may load only selected models, unlike the embedded one
        others = [name for name in others if states[name].state == "UNAVAILABLE" and states[name].reason != "unloaded"]
    fix = "mend it, or remove it from the repository; then start Triton again"
    texts = {
        name: f"{name} is in Triton's repository, but not ready: {states[name].reason or 'its log has the reason'}"
        for name in others
    }
    unloadable = unloadable_models(Path(settings.model_repository), ready, is_embedded=not settings.triton_endpoints)
    texts |= {name: found.reason for name, found in unloadable.items()}
    return states, [ok("models", text), *(warning("models", reason, fix) for reason in texts.values())]


async def _check_process(client: TritonClient, name: str) -> Finding | None:
    # An inference alone shows that a process of the model has died.
    try:
        spec = from_triton_config(*await client.read_config(name))
        if spec.dtype is not None:
            await run_probe(client, spec)
    except (ModelDied, DeadlinePassed) as error:
        return inference.failed_inference(name, error)
    except GatewayError:  # not a model for the gateway, or not ready any more
        pass
    return None
