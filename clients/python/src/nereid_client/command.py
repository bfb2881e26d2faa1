"""The command `nereid-client detect`: many pictures, several at a time, into one result file that a later run continues."""

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from nereid_client.client import URL, AsyncClient
from nereid_client.errors import NereidError, Problem, UnexpectedResponse, Unreachable
from nereid_client.formats import WRITERS, label_file, write_yolo
from nereid_client.journal import Journal, JournalError
from nereid_client.pictures import pictures_in
from nereid_client.prepare import Prepare
from nereid_client.results import DetectResult

_FORMATS = {".jsonl": "jsonl", ".json": "coco", ".csv": "csv", "": "yolo"}
_FAILED = 1
# The exit code a shell reports for a program ended by SIGINT.
_INTERRUPTED = 130
# Problems that the request for any other picture would get as well.
_STOPPING_STATUS = {401, 403, 404, 503}
_STOPPING_CODES = {"invalid_parameter", "wrong_task"}
_PARAMETERS = ("model", "version", "confidence", "iou", "classes", "max_detections", "timeout_ms", "truncated", "boxes", "prepare")

Failures = dict[str, NereidError | OSError]
Gateway = AbstractContextManager[str | None]
"""Yields the path of the unix socket on which a gateway runs until the block ends."""


class UsageError(Exception):
    """The arguments contradict each other or the files; the message is one line for the user."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, 1 if a picture failed, 2 for wrong arguments, 130 after Ctrl-C."""
    return run(parse(arguments))


def parse(arguments: Sequence[str] | None = None, prog: str = "nereid-client detect") -> argparse.Namespace:
    """Parse the arguments; exit with 2 if they are wrong."""
    parser = argparse.ArgumentParser(prog=prog.partition(" ")[0], description="Client of Nereid, a gateway for object detection.")
    detect = parser.add_subparsers(required=True, metavar="command").add_parser(
        "detect",
        prog=prog,
        help="detect the objects in pictures",
        description="Detect the objects in pictures. A run that is repeated with the same --out sends only the pictures without "
        "a result. Exit code: 0; 1 if a picture failed; 2 for wrong arguments; 130 after Ctrl-C. NEREID_KEY is the API key.",
    )
    add = detect.add_argument
    add("pictures", nargs="+", type=Path, metavar="PICTURE", help="a picture, or a folder of pictures and folders")
    add("--url", default=URL, help="address of the gateway (default: %(default)s)")
    add("--socket", help="unix socket of the gateway, instead of its host and port")
    add("--out", type=Path, help="result file: .jsonl, .csv, .json (COCO), or a folder (YOLO); by default lines on stdout")
    add("--format", choices=_FORMATS.values(), help="format of --out, instead of what its suffix says")
    add("--save-conf", action="store_true", help="YOLO: write the confidence as sixth number")
    add("--drawn", type=Path, metavar="DIR", help="folder for pictures with their boxes drawn on them")
    add("--in-flight", type=_at_least_one, default=4, metavar="N", help="requests at the same time (default: %(default)s)")
    add("--prepare", type=_prepare, metavar="SIDE:QUALITY", help="shrink larger pictures before they are sent, such as 1280:85")
    add("--boxes", choices=("pixel", "normalized"), default="pixel", help="unit of boxes in .jsonl and .csv (default: %(default)s)")
    for name in _PARAMETERS[:-2]:
        add(f"--{name.replace('_', '-')}", help="parameter of the gateway")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace, gateway: Gateway | None = None) -> int:
    """Carry out what the arguments say, with a gateway that runs meanwhile, if one is given; return the exit code."""
    failures: Failures = {}
    code = 0
    try:
        pictures, journal_path, write = _plan(options)
        with Journal(journal_path, _parameters(options)) as journal:
            left = {picture: name for name, picture in pictures.items() if name not in journal.done}
            try:
                if left:
                    with gateway or nullcontext(options.socket) as options.socket:
                        asyncio.run(_detect(options, left, journal, failures))
            except KeyboardInterrupt:
                code = _INTERRUPTED
            except (NereidError, OSError) as error:
                _say(f"stopped: {error}")
                code = _FAILED
            write(journal)
            for name, failure in failures.items():
                _say(f"{name}: {failure}")
            if options.out:
                found = len(pictures.keys() & journal.done)
                again = "; the next run sends the others" if found < len(pictures) else ""
                _say(f"pictures: {len(pictures)}, new: {len(left)}, with a result: {found}{again}")
    except KeyboardInterrupt:  # while the result file is written
        return _INTERRUPTED
    except (UsageError, JournalError) as error:
        _say(str(error))
        return 2
    except OSError as error:
        _say(f"{error.filename or options.out}: {error.strerror}")
        return 2
    return code or (_FAILED if failures else 0)


def _plan(options: argparse.Namespace) -> tuple[dict[str, Path], Path | None, Callable[[Journal], None]]:
    """Return the pictures by name, the file of the journal, and what writes the result file from it."""
    if options.prepare and find_spec("PIL") is None:
        raise UsageError("--prepare needs Pillow: pip install 'nereid-client[prepare]'")
    out: Path | None = options.out
    kind = options.format or _FORMATS.get(out.suffix.lower() if out else ".jsonl")
    if kind is None:
        raise UsageError(f"{out}: use --format, or one of the suffixes .jsonl, .csv and .json, or none for a folder")
    pictures = _named(options.pictures, options.drawn)
    if options.drawn or kind == "yolo":
        _require_different_stems(pictures)
    if out is None or kind == "jsonl":
        return pictures, out, lambda _: None
    journal = out / "results.jsonl" if kind == "yolo" else out.with_name(f"{out.name}.jsonl")
    if not journal.exists() and (out.is_file() or (out.is_dir() and any(out.iterdir()))):
        raise UsageError(f"{out} exists and was not made by this command, which would overwrite it; use another --out")
    if kind == "yolo":
        return pictures, journal, partial(write_yolo, out=out, with_confidence=options.save_conf)
    return pictures, journal, lambda lines: WRITERS[kind](lines, out)


def _named(given: list[Path], drawn: Path | None) -> dict[str, Path]:
    """Return all pictures by their path in the folder that was given, or by their name."""
    named: dict[str, Path] = {}
    for path in given:
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        found = pictures_in(path) if path.is_dir() else [path]
        for picture in found:
            if drawn and picture.parent.resolve().is_relative_to(drawn.resolve()):
                continue
            name = picture.relative_to(path).as_posix() if path.is_dir() else picture.name
            if name.encode(errors="replace").decode() != name:
                raise UsageError(f"the name {name} is not UTF-8; rename the file")
            if named.setdefault(name, picture) != picture:
                raise UsageError(f"{named[name]} and {picture} would both be {name}; give one folder that contains both")
    if not named:
        raise UsageError("there are no pictures")
    return named


def _require_different_stems(pictures: dict[str, Path]) -> None:
    seen: dict[Path, str] = {}
    for name in pictures:
        if (other := seen.setdefault(label_file(Path(), name), name)) != name:
            raise UsageError(f"{other} and {name} would have one file of labels or boxes; rename one of them")


def _parameters(options: argparse.Namespace) -> dict[str, Any]:
    """Return what decides over the results: lines of different parameters do not go into one file."""
    return {name: str(value) for name in _PARAMETERS if (value := getattr(options, name)) is not None}


async def _detect(options: argparse.Namespace, pictures: dict[Path, str], journal: Journal, failures: Failures) -> None:
    """Send pictures, write what is found to the journal, and note failures; raise the error that others would get, too."""
    transport = httpx.AsyncHTTPTransport(uds=options.socket) if options.socket else None
    request: dict[str, Any] = {name: value for name in _PARAMETERS if (value := getattr(options, name)) is not None}
    async with AsyncClient(options.url, key=os.environ.get("NEREID_KEY"), transport=transport) as client:
        each = client.detect_each(pictures, in_flight=options.in_flight, draw=options.drawn is not None, **request)
        with _progress(len(pictures)) as advance:
            async with aclosing(each) as outcomes:
                async for picture, outcome in outcomes:
                    name = pictures[picture]
                    if isinstance(outcome, DetectResult):
                        if outcome.visualization:
                            target = options.drawn / Path(name).with_suffix(".jpg")
                            target.parent.mkdir(parents=True, exist_ok=True)
                            target.write_bytes(outcome.visualization)
                        journal.add(name, outcome)
                    elif _would_repeat(outcome):
                        raise outcome
                    else:
                        failures[name] = outcome
                    advance()


def _would_repeat(error: Exception) -> bool:
    """Return whether other pictures would get the same error."""
    return isinstance(error, Unreachable | UnexpectedResponse) or (
        isinstance(error, Problem) and (error.status in _STOPPING_STATUS or error.code in _STOPPING_CODES)
    )


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show a bar while pictures are sent, if stderr is a terminal and rich is installed."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415 - an extra
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn  # noqa: PLC0415

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _at_least_one(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _prepare(text: str) -> Prepare:
    side, _, quality = text.partition(":")
    try:
        return Prepare(int(side), int(quality or Prepare(1).quality))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not SIDE:QUALITY, such as 1280:85") from error


def _say(text: str) -> None:
    """Write a line to stderr; what names and responses contain does not control the terminal."""
    print("".join(char if char.isprintable() else ascii(char)[1:-1] for char in text), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
