"""The command line of `nereid`."""

import signal

if __name__ == "__main__":  # no traceback after Ctrl-C during the imports
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from app import feature, healthcheck, preflight
from app.api.caller import keys
from app.api.caller.keys import KeysError
from app.arguments import declare
from app.embedded import detect, gpu
from app.embedded.defaults import require_not_default
from app.embedded.folder import TritonFolder, has_gpu, runs_elsewhere
from app.embedded.install import has_gpu_environment
from app.embedded.postgres.backup import backup, restore
from app.embedded.postgres.server import embedded_database
from app.embedded.supervisor import ignore_signals, supervise
from app.host import allocator, ports, program
from app.host.processes import SUPERVISED, become_worker, die_with_parent
from app.host.program import Busy, CommandError, NoSuchModel
from app.model.reference import split_reference
from app.preparation import prepare
from app.resilience import last_valid, worker_table
from app.routing import routes
from app.routing.report import report
from app.routing.routes import RoutesError
from app.settings import table
from app.settings.schema import PREFIX, Settings, SettingsError
from app.telemetry import logging, streams
from app.telemetry.logging import say, write_whole_lines
from app.zoo import registry
from app.zoo.listing import describe_models, name_user
from app.zoo.recognize import Evaluation
from app.zoo.repository import Repository, require_name

if TYPE_CHECKING:
    from app.embedded.server import EmbeddedTriton

_POLL_SECONDS = 0.2
_SEARCH_PORT = "4605"
# The exit code a shell reports for a program ended by SIGINT.
_INTERRUPTED = 128 + signal.SIGINT
_ADD_NICENESS = 10  # requests go first; with 19, the check of a model would take minutes on a busy machine
# Each has a one-line message for the user.
_FAILURES = (CommandError, SettingsError, KeysError)


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    write_whole_lines()
    options = make_parser().parse_args(arguments)
    if getattr(options, "search", None) == "alone":
        os.environ[f"{PREFIX}PORT"] = os.environ.get(f"{PREFIX}PORT") or _SEARCH_PORT
    for flag in ("port", "workers", "instances", "model", "triton", "search", "gpu"):
        if (value := getattr(options, flag, None)) is not None:
            os.environ[PREFIX + {"triton": "TRITON_ENDPOINTS"}.get(flag, flag.upper())] = str(value)
    try:
        # Containers stop the process with SIGTERM, users with Ctrl-C; a shell's background jobs ignore SIGINT by default.
        for stop in (signal.SIGTERM, signal.SIGINT):
            signal.signal(stop, signal.default_int_handler)
        settings = feature.read_settings()
        feature.check(settings)
        if settings.routes_file and options.run is not _api:  # whose workers follow the file
            settings = _resolve_default(settings)
        return int(options.run(settings, options) or 0)
    except _FAILURES as error:
        say(" ".join(str(error).split()))
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _resolve_default(settings: Settings) -> Settings:
    """Name the model for which the default one stands, if that is a route; `serve` and `doctor` say what is wrong with the file."""
    with suppress(RoutesError):
        if route := routes.load(settings.routes_file).get(settings.model):
            return msgspec.structs.replace(settings, model=split_reference(route.to)[0])
    return settings


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    epilog = "nereid bench --help: measure a server that runs" if program.IS_ONE_FILE else None
    parser = argparse.ArgumentParser(prog="nereid", description="An HTTP gateway for object detection on Triton.", epilog=epilog)
    parser.add_argument("--version", action="version", version=f"nereid {program.version()}")
    commands = parser.add_subparsers(required=True, metavar="command")
    optional = [(owner, each) for owner, declared in feature.declarations().items() for each in declared.commands]
    for name, run, text in (
        ("serve", _serve, "run the API and, unless another Triton is named, the embedded one"),
        ("search", _serve, "run the API of search alone, on port 4605, with the Triton of a running `serve` if there is one"),
        ("detect", _detect, "detect the objects in pictures and folders, with a gateway that runs as long as that takes"),
        ("api", _api, "run the API alone"),
        ("triton", _triton, "run the embedded Triton alone"),
        ("pull", _pull, "download a model and add it to the model repository"),
        ("add", _add, "add a network of your own, exported to ONNX, as a model or its next version; or a cascade of models"),
        ("models", _models, "list the models that were pulled or added, and the cascades"),
        ("use", _use, "make a version, such as doors:1, the default version of a model"),
        ("load", _load, "let the running Triton load a model of the repository, or its changes"),
        ("unload", partial(_load, loads=False), "let the running Triton unload a model, until it starts again"),
        ("remove", _remove, "remove a model, or a version of it, or a cascade"),
        ("compare", _compare, "compare the answers of a route's shadow with those of its model, since the gateway started"),
        ("key", _key, "create an API key"),
        ("database", _database, "copy the database of search into a file, or back into an empty one"),
        ("doctor", _doctor, "check this machine and a running Triton"),
        ("healthcheck", _healthcheck, "ask the API whether it lives; exit code 0 if it does"),
        ("settings", _settings, "print the table of settings"),
    ):
        for owner, each in optional:
            if each.before != name:
                continue
            extra = commands.add_parser(each.name, help=each.text, description=each.text)
            extra.set_defaults(run=partial(_run_of_feature, owner, each.name))
            for argument, options in each.arguments:
                extra.add_argument(argument, **options)
        # The client parses the arguments of `detect`, options and all.
        parses: dict[str, Any] = {"prefix_chars": "\0", "add_help": False} if name == "detect" else {}
        command = commands.add_parser(name, help=text, description=text, **parses)
        command.set_defaults(run=run)
        declare(command, name)
    return parser


def _serve(settings: Settings, _: argparse.Namespace) -> int:
    streams.never_wait()
    preflight.require_startable(settings)
    is_alone = settings.search == "alone"
    with ExitStack() as stack:
        database = embedded_database(settings, stack, is_required=is_alone)
        if settings.triton_endpoints or (is_alone and runs_elsewhere(TritonFolder(settings))):
            return supervise(settings, None, database)
        triton = stack.enter_context(_embedded_triton(settings))
        say(f"Triton is ready with the models in {Path(settings.model_repository).absolute()}; its log is {triton.log}")
        return supervise(settings, triton, database)


def _api(settings: Settings, _: argparse.Namespace) -> int:
    streams.never_wait()
    if settings.search == "on" and SUPERVISED not in os.environ:
        preflight.require_startable(settings)
        return supervise(settings, None)
    allocator.set_granian_decay()
    # Imported here, because other commands need no server.
    from app.server import Server  # noqa: PLC0415

    logging.configure(settings.log_level)
    last_valid.create()
    preflight.require_usable(settings)
    preflight.require_address(settings)
    if not settings.socket and not settings.api_keys_file and not ports.is_loopback(settings.host):
        say(f"warning: no API key is needed at {settings.address}, which is not loopback; set {PREFIX}API_KEYS_FILE")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.register_at_fork(after_in_child=partial(become_worker, os.getpid()))
    worker_table.create()
    feature.share(settings)
    Server(settings).serve()
    return 0


def _triton(settings: Settings, _: argparse.Namespace) -> int:
    with _embedded_triton(settings) as triton:
        say(f"ready: gRPC at {settings.triton_address}; the log is {triton.log}; Ctrl-C stops it")
        try:
            while (code := triton.poll()) is None:
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            return 0
        raise CommandError(f"Triton exited with code {code}; its log is {triton.log}")


@contextmanager
def _embedded_triton(settings: Settings) -> Iterator["EmbeddedTriton"]:
    """Run the embedded Triton; first install it and pull the default model if necessary."""
    # Imported here, because it loads gRPC, which must not be loaded in the process that forks Granian's workers.
    from app.embedded.server import EmbeddedTriton  # noqa: PLC0415

    triton = EmbeddedTriton(settings)
    try:
        triton.claim()  # before the installation, which takes minutes
        triton.device = gpu.choose(settings)
        try:
            prepare(settings, for_gpu=bool(triton.device.gpu))
            triton.start()
        except CommandError as error:
            if not triton.device.gpu:
                raise
            triton.leave_gpu(str(error))
            triton.claim()  # which a failed start has given up
            prepare(settings, for_gpu=False)
            triton.start()
        yield triton
    finally:
        ignore_signals()
        triton.stop()


def _detect(settings: Settings, options: argparse.Namespace) -> int:
    return detect.run(settings, options.arguments)


def _pull(settings: Settings, options: argparse.Namespace) -> None:
    from app.embedded import control  # noqa: PLC0415 - it loads gRPC
    from app.zoo.pull import pull  # noqa: PLC0415 - it loads numpy and OpenCV

    os.nice(_ADD_NICENESS)
    wanted, repository = options.name or settings.model, Repository(Path(settings.model_repository))
    changes = {option: value for option in Evaluation.__struct_fields__ if (value := getattr(options, option)) is not None}
    entries = {name: entry.vary(changes) for name, entry in registry.select(registry.load(), wanted).items()}
    if options.sha256 and len(entries) > 1:
        raise CommandError(f"--sha256 is for one model; {wanted} is {', '.join(entries)}")
    control.find_obstacle(settings)  # tells the wrong user before anything is changed
    get = partial(pull, source=options.source, sha256=options.sha256, is_production=_is_production(settings, options))
    for name, entry in entries.items():
        later = get(name, entry, repository, partial(control.apply, settings))
        say(f"{name_user(name, repository)} uses it {later}".rstrip())


def _add(settings: Settings, options: argparse.Namespace) -> None:
    from app.embedded import control  # noqa: PLC0415 - it loads gRPC
    from app.zoo import cascades  # noqa: PLC0415 - it loads numpy
    from app.zoo.add import Request, add  # noqa: PLC0415 - it loads numpy and OpenCV
    from app.zoo.recognize import read_options  # noqa: PLC0415

    if options.source.endswith(".toml"):
        if options.sha256:
            raise CommandError("--sha256 is for a network; the file of a cascade has none")
        folder = options.out or Path(settings.model_repository)
        settings = msgspec.structs.replace(settings, model_repository=str(folder))
        cascades.add(Path(options.source), options.name, Repository(folder), partial(control.read_spec, settings))
        return
    os.nice(_ADD_NICENESS)
    if options.untrusted:
        die_with_parent(os.getppid())  # the worker of the API that has received the file
    given = read_options(vars(options), may_read_files=not options.untrusted)
    kind = {"is_untrusted": options.untrusted, "is_accepted": options.accept, "is_production": _is_production(settings, options)}
    request = Request(options.source, options.name, options.licence, options.samples, given, sha256=options.sha256, **kind)
    if options.out:
        name, _ = add(request, Repository(options.out), lambda _: "")
        say(f"copy {options.out / name} to the model repository of a Triton")
        return
    control.find_obstacle(settings)  # tells the wrong user before anything is changed

    def load(name: str) -> str:
        later = control.apply(settings, name)
        if later and options.untrusted and not settings.triton_endpoints:  # a model that kills Triton would stay
            raise Busy(f"Triton does not run now, and does not load {name}; try again")
        return later

    repository = Repository(Path(settings.model_repository))
    name, later = add(request, repository, load)
    say(f"{name_user(name, repository)} uses it {later}".rstrip())


def _is_production(settings: Settings, options: argparse.Namespace) -> bool:
    """Return whether models are made in FP16, too, for a GPU: a Triton elsewhere has one, the embedded one may have."""
    is_wanted = settings.gpu != "off" and has_gpu_environment(Path(settings.triton_home))
    return options.production or bool(settings.triton_endpoints) or has_gpu(settings) or is_wanted


def _models(settings: Settings, _: argparse.Namespace) -> None:
    from app.embedded import control  # noqa: PLC0415 - it loads gRPC

    for line in describe_models(Repository(Path(settings.model_repository)), control.read_usage(settings)):
        print(line)


def _use(settings: Settings, options: argparse.Namespace) -> None:
    from app.embedded import control  # noqa: PLC0415 - it loads gRPC

    control.find_obstacle(settings)
    repository, name = Repository(Path(settings.model_repository)), split_reference(options.reference)[0]
    with repository.writing():
        old = repository.load(name)
        found = repository.use(options.reference)
        later = repository.load_into(partial(control.apply, settings), name, old)
    say(f"{name} is version {found.default_version} {later}".rstrip())


def _load(settings: Settings, options: argparse.Namespace, *, loads: bool = True) -> None:
    from app.embedded import control  # noqa: PLC0415 - it loads gRPC

    repository = Repository(Path(settings.model_repository))
    with repository.writing():
        if not (repository.path / require_name(options.name)).is_dir():
            raise NoSuchModel(f"there is no model {options.name} in {repository.path}")
        if not loads:
            require_not_default(options.name)
        later = control.apply(settings, options.name, loads=loads)
    say(f"{options.name} is {'loaded' if loads else 'unloaded'} {later}".rstrip())


def _remove(settings: Settings, options: argparse.Namespace) -> None:
    from app.embedded import control  # noqa: PLC0415 - it loads gRPC
    from app.zoo import cascades  # noqa: PLC0415 - it loads numpy

    control.find_obstacle(settings)
    repository, (name, version) = Repository(Path(settings.model_repository)), split_reference(options.reference)
    if cascades.put(options.reference, None, repository):
        say(f"{name} is removed")
        return
    with repository.writing():
        found = repository.load(name)
        if found is not None:
            require_not_default(name, version if [*found.versions] != [version] else "")
        repository.remove(options.reference)
        later = control.apply(settings, name)
    say(f"{options.reference} is removed {later}".rstrip())


def _key(settings: Settings, options: argparse.Namespace) -> None:
    credential, table = keys.create(options.id)
    print(credential)
    if sys.stderr.isatty():  # not in a file to which the table is appended
        file, setting = settings.api_keys_file, f"{PREFIX}API_KEYS_FILE"
        where = file or f"a file such as keys.toml (chmod 600, owned by the user that runs Nereid), and set {setting} to its path"
        say(f"add this table to {where}; the client sends the line above, which is shown only now: `X-API-Key: ID.SECRET`")
    print(table, file=sys.stderr)


def _compare(settings: Settings, options: argparse.Namespace) -> None:
    print(report(settings.local_url, settings.sockets, options.name, options.key_file))


def _run_of_feature(owner: str, name: str, settings: Settings, options: argparse.Namespace) -> int | None:
    return feature.load(owner).commands[name](settings, options)


def _database(settings: Settings, options: argparse.Namespace) -> None:
    (backup if options.action == "backup" else restore)(settings, options.file)
    say(f"the records are in {options.file} now" if options.action == "backup" else f"the records are those of {options.file} now")


def _doctor(settings: Settings, options: argparse.Namespace) -> int:
    from app.doctor.report import run  # noqa: PLC0415 - it loads gRPC

    return run(settings, as_json=options.json, is_strict=options.strict)


def _healthcheck(settings: Settings, _: argparse.Namespace) -> None:
    if wrong := healthcheck.failure(settings):
        raise CommandError(wrong)


def _settings(_: Settings, __: argparse.Namespace) -> None:
    print(table.render(feature.kinds()))


if __name__ == "__main__":
    sys.exit(main())
