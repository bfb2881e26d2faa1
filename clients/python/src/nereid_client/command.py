"""The command `nereid-client detect`: many pictures, several at a time, into one result file that a later run continues."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, closing, contextmanager, nullcontext, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Any

import httpx

from nereid_client.client import URL, AsyncClient
from nereid_client.errors import NereidError, Problem
from nereid_client.formats import CLASSES, write_coco, write_csv, write_yolo
from nereid_client.journal import Journal, UsageError
from nereid_client.pictures import pictures_in
from nereid_client.prepare import Prepare
from nereid_client.results import DetectResult

_FORMATS = {".jsonl": "jsonl", ".json": "coco", ".csv": "csv", "": "yolo"}
_BOXES = {"coco": "pixel", "yolo": "normalized"}
"""What the writers of these formats need."""
_INTERRUPTED = 130
"""The exit code a shell reports for a program ended by SIGINT."""
# Problems that the request for any other picture would get as well.
_STOPPING_STATUS = {401, 403, 404, 503}
_STOPPING_CODES = {"invalid_parameter", "wrong_task"}
_GIVEN = ("model", "version", "confidence", "iou", "classes", "max_detections", "timeout_ms", "truncated")
_PARAMETERS = (*_GIVEN, "boxes", "task", "prepare")

Names = dict[Path, str]
"""Pictures, and their path in the folder that was given, or their name."""
Failures = dict[str, NereidError | OSError]
Gateway = AbstractContextManager[str | None]
"""Yields the path of the unix socket on which a gateway runs until the block ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 1 if a picture failed, 2 for wrong arguments, 130 after Ctrl-C."""
    return run(parse(arguments))


def parse(arguments: Sequence[str] | None = None, prog: str = "nereid-client", *, has_gateway: bool = False) -> argparse.Namespace:
    """Parse the arguments, without an address if `run` gets a gateway; exit with 2 if they are wrong."""
    parser = argparse.ArgumentParser(prog=prog, description="Client of Nereid, a gateway for object detection.")
    detect = parser.add_subparsers(required=True, metavar="command").add_parser(
        "detect",
        help="detect the objects in pictures",
        description="Detect the objects in pictures. A run that is repeated with the same --out sends only the pictures without "
        "a result. Exit code: 0; 1 if a picture failed; 2 for wrong arguments; 130 after Ctrl-C. NEREID_KEY is the API key.",
    )
    add = detect.add_argument
    add("pictures", nargs="+", type=Path, metavar="PICTURE", help="a picture, or a folder of pictures and folders")
    detect.set_defaults(url=URL, socket=None)
    if not has_gateway:
        add("--url", help="address of the gateway (default: %(default)s)")
        add("--socket", help="unix socket of the gateway, instead of its host and port")
    add("--out", type=Path, help="result file: .jsonl, .csv, .json (COCO), or a folder (YOLO); by default lines on stdout")
    add("--format", choices=_FORMATS.values(), help="format of --out, instead of what its suffix says")
    add("--save-conf", action="store_true", help="YOLO: write the confidence as sixth number")
    add("--drawn", type=Path, metavar="DIR", help="folder for pictures with their boxes drawn on them")
    add("--in-flight", type=_at_least_one, default=4, metavar="N", help="requests at the same time (default: %(default)s)")
    add("--prepare", type=_prepare, metavar="SIDE:QUALITY", help="shrink larger pictures before they are sent, such as 1280:85")
    add("--boxes", choices=("pixel", "normalized"), default="pixel", help="unit of boxes in .jsonl and .csv (default: %(default)s)")
    add("--task", choices=("detect", "segment", "pose", "obb"), help="find masks, keypoints or oriented boxes, too")
    for name in _GIVEN:
        add(f"--{name.replace('_', '-')}", help="parameter of the gateway")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, gateway: Gateway | None = None) -> int:
    """Carry out what the arguments say, with a gateway that runs meanwhile, if one is given; return the exit code."""
    try:
        return _run(options, gateway or nullcontext(options.socket))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except (UsageError, OSError, httpx.InvalidURL) as error:
        _say(str(error))
        return 2


def _run(options: argparse.Namespace, gateway: Gateway) -> int:
    if options.prepare and find_spec("PIL") is None:
        raise UsageError("--prepare needs Pillow: pip install 'nereid-client[prepare]'")
    out: Path | None = options.out
    kind = options.format or _FORMATS.get(out.suffix.lower() if out else ".jsonl")
    if kind is None:
        raise UsageError(f"{out}: use --format, or one of the suffixes .jsonl, .csv and .json, or none for a folder")
    names = _named(options, kind)
    request: dict[str, Any] = {name: value for name in _PARAMETERS if (value := getattr(options, name)) is not None}
    request |= {"masks": "none"} if kind == "csv" and options.task == "segment" and not options.drawn else {}
    request |= {"boxes": _BOXES.get(kind, options.boxes)} | ({"draw": True} if options.drawn else {})
    yolo = partial(write_yolo, with_confidence=options.save_conf)
    writers: dict[str, Callable[[Journal, Path], None]] = {"csv": write_csv, "coco": write_coco, "yolo": yolo}
    failures: Failures = {}
    code = 0
    with closing(Journal(_journal_path(out, kind), request)) as journal:
        left = {picture: name for picture, name in names.items() if name not in journal.done}
        try:
            try:
                if left:
                    with gateway as options.socket:
                        asyncio.run(_detect(options, request, left, journal, failures))
            finally:
                if out and kind in writers:
                    writers[kind](journal, out)
        except (KeyboardInterrupt, asyncio.CancelledError):
            code = _INTERRUPTED
        except (NereidError, OSError) as error:
            _say(f"stopped: {error}")
            code = 1
    for name, failure in failures.items():
        _say(f"{name}: {failure}")
    if out:
        found = len(journal.done.intersection(names.values()))
        again = "; the next run sends the others" if found < len(names) else ""
        _say(f"pictures: {len(names)}, new: {len(left)}, with a result: {found}{again}")
    return code or int(bool(failures))


def _journal_path(out: Path | None, kind: str) -> Path | None:
    if out is None or kind == "jsonl":
        return out
    journal = out / "results.jsonl" if kind == "yolo" else out.with_name(f"{out.name}.jsonl")
    if not journal.exists() and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise UsageError(f"{out} exists and was not made by this command, which would overwrite it; use another --out")
    return journal


def _named(options: argparse.Namespace, kind: str) -> Names:
    """Return the pictures, each once, without those that earlier runs have drawn."""
    drawn = options.drawn and options.drawn.resolve()
    names: Names = {}
    # Labels and drawn pictures have the name of the picture, but another suffix.
    seen: dict[PurePath, object] = {PurePath(CLASSES).with_suffix(""): CLASSES} if kind == "yolo" else {}
    for path in options.pictures:
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        for picture in pictures_in(path) if path.is_dir() else [path]:
            if picture in names or (drawn and picture.parent.resolve().is_relative_to(drawn)):
                continue
            name = picture.relative_to(path).as_posix() if path.is_dir() else picture.name
            name = name.encode(errors="backslashreplace").decode()  # JSON is UTF-8, as names of files need not be
            key = PurePath(name).with_suffix("") if drawn or kind == "yolo" else PurePath(name)
            if (other := seen.setdefault(key, picture)) != picture:
                raise UsageError(
                    f"{other} and {picture} would both be {key} in the results; rename one, or give a folder with both"
                )
            names[picture] = name
    if not names:
        raise UsageError("there are no pictures")
    return names


async def _detect(options: argparse.Namespace, request: dict[str, Any], names: Names, journal: Journal, failures: Failures) -> None:
    """Send pictures, write what is found to the journal, and note failures; raise the error that others would get, too."""
    _cancel_after_interrupt()
    transport = httpx.AsyncHTTPTransport(uds=options.socket) if options.socket else None
    async with AsyncClient(options.url, key=os.environ.get("NEREID_KEY"), transport=transport) as client:
        with _progress(len(names)) as advance:
            async with aclosing(client.detect_each(names, in_flight=options.in_flight, **request)) as outcomes:
                async for picture, outcome in outcomes:
                    name = names[picture]
                    if isinstance(outcome, DetectResult):
                        if outcome.visualization:
                            target = options.drawn / Path(name).with_suffix(".jpg")
                            target.parent.mkdir(parents=True, exist_ok=True)
                            target.write_bytes(outcome.visualization)
                        journal.add(name, outcome)
                    elif isinstance(outcome, OSError) or (isinstance(outcome, Problem) and not _would_repeat(outcome)):
                        failures[name] = outcome
                    else:
                        raise outcome
                    advance()


def _cancel_after_interrupt() -> None:
    # asyncio's own handler may run in the middle of a callback, which then fails with a traceback.
    task = asyncio.current_task()
    if task is not None and callable(signal.getsignal(signal.SIGINT)):  # a shell's background jobs ignore it
        with suppress(NotImplementedError):  # on Windows
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)


def _would_repeat(problem: Problem) -> bool:
    """Return whether other pictures would get the same problem."""
    return problem.status in _STOPPING_STATUS or problem.code in _STOPPING_CODES


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while pictures are sent, if stderr is a terminal and rich is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415 - an extra
    from rich.progress import Progress  # noqa: PLC0415

    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _prepare(text: str) -> Prepare:
    return Prepare(*map(_at_least_one, text.split(":")))


def _say(text: str) -> None:
    """Write a line to stderr; what names and responses contain does not control the terminal."""
    print("".join(char if char.isprintable() else ascii(char)[1:-1] for char in text), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
