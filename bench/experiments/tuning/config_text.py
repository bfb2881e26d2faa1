"""Edit a model's config file: change only the differing values, and keep comments and layout."""

import os
import re
import shutil
from contextlib import suppress
from difflib import unified_diff
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from app.triton.config_file import ConfigFileError, read_config_file
from app.zoo import description
from app.zoo.description import Serving
from app.zoo.repository import Repository
from bench.experiments.tuning.variant import THREADS, Variant, changes, read_variant, write_variant
from bench.harness.errors import ContestantError

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\')|#[^\n]*')
_NUMBER = r"\s*:\s*(\d+)"
_COUNT = re.compile(r"\binstance_group\b[^}]*?\bcount" + _NUMBER)
_GROUP = re.compile(r"\binstance_group\s*:?\s*\[?\s*\{()")
_THREADS = re.compile(rf'"{THREADS}"\s*,?\s*value\s*:?\s*\{{\s*string_value\s*:\s*"(\d+)"')
_BATCHES = re.compile(rf"\b(?:max_batch_size|batch_size){_NUMBER}|\bpreferred_batch_size\s*:\s*\[?\s*(\d+)")
_DELAY = re.compile(r"\bmax_queue_delay_microseconds" + _NUMBER)
_BATCHING = re.compile(r"\bdynamic_batching\s*:?\s*\{()")


def edit(path: Path, variant: Variant) -> str:
    """Return the text of a config file, changed to a variant.

    Raises:
        ConfigFileError: It cannot be read, or is not valid.
        ContestantError: Its layout is not supported.
    """
    before = read_config_file(path)
    edited = _replace(path.read_text(encoding="utf-8"), read_variant(before, has_threads=True, calls=None), variant.config)
    with TemporaryDirectory(prefix="nereid-bench-") as folder:
        written = Path(folder, path.name)
        written.write_text(edited, encoding="utf-8")
        with suppress(ConfigFileError):
            if read_config_file(written) == write_variant(before, variant):
                return edited
    raise ContestantError(f"{path} is written in a way that is not understood; edit it yourself: {variant.config}")


def difference(path: Path, text: str) -> list[str]:
    """Return the lines that `text` changes in a file: old lines with `-`, new lines with `+`."""
    lines = unified_diff(path.read_text(encoding="utf-8").splitlines(), text.splitlines(), n=0, lineterm="")
    return [line for line in list(lines)[2:] if not line.startswith("@@")]


def write(path: Path, text: str, variant: Variant) -> None:
    """Write a config file atomically; for one that is generated, write the variant to the model's description.

    Raises:
        ContestantError: It cannot be written.
    """
    path = path.resolve()
    kind, folder = ("embedded", path.parents[1]) if path.parent.name == "configs" else ("production", path.parent)
    if (found := description.load(folder)) is not None:
        values = {name: getattr(variant, name) for name in Serving.__struct_fields__}
        given = {name: value for name, value in values.items() if value is not None}
        repository, serving = Repository(folder.parent), msgspec.structs.replace(getattr(found, kind), **given)
        with repository.writing():
            repository.write(folder.name, msgspec.structs.replace(found, **{kind: serving}))
        return
    written = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        written.write_text(text, encoding="utf-8")
        shutil.copymode(path, written)
        written.replace(path)
    except OSError as error:
        with suppress(OSError):
            written.unlink()
        raise ContestantError(f"{path} cannot be written: {error.strerror}") from error


def _replace(text: str, old: Variant, new: Variant) -> str:
    """Change the values in which two variants differ."""
    wanted = changes(old, new)
    if count := wanted.get("instances"):
        added = f"{text.rstrip()}\n\ninstance_group [ {{ count: {count} }} ]\n"
        text = _set(text, _COUNT, count) or _set(text, _GROUP, f" count: {count}") or added
    if threads := wanted.get("threads"):
        added = f'{text.rstrip()}\nparameters {{ key: "{THREADS}" value {{ string_value: "{threads}" }} }}\n'
        text = _set(text, _THREADS, threads) or added
    if max_batch := wanted.get("max_batch"):
        text = _set(text, _BATCHES, max_batch, instead_of=str(old.max_batch)) or text
    if (delay := wanted.get("delay_us")) is not None:
        text = _set(text, _DELAY, delay) or _set(text, _BATCHING, f" max_queue_delay_microseconds: {delay}") or text
    return text


def _set(text: str, pattern: re.Pattern[str], value: object, *, instead_of: str = "") -> str | None:
    """Set the value in the group of a pattern, outside of comments; return None if the pattern does not match."""
    without_comments = _COMMENT.sub(lambda found: found[1] or " " * len(found[0]), text)
    spans = [match.span(match.lastindex or 1) for match in pattern.finditer(without_comments)]
    spans = [(start, end) for start, end in spans if not instead_of or text[start:end] == instead_of]
    for start, end in reversed(spans):
        text = f"{text[:start]}{value}{text[end:]}"
    return text if spans else None
