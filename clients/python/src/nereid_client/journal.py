"""The results of a run, one line of JSON for each picture: what a later run continues from, and what other formats are made of."""

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

import msgspec

from nereid_client.results import Detection, DetectResult, ImageSize, ModelUsed


class UsageError(Exception):
    """The arguments contradict each other or the files; the message is one line for the user."""


class Line(msgspec.Struct, frozen=True):
    """The result of one picture."""

    file: str
    """Path of the picture: relative to the folder that was given, or its name."""
    image: ImageSize
    model: ModelUsed
    detections: list[Detection]
    request_id: str
    parameters: dict[str, str]
    """What the run asked for. The lines of one file have the same."""


class Journal:
    """A file of lines, or only the standard output."""

    def __init__(self, path: Path | None, parameters: dict[str, Any]) -> None:
        """Open or create a file; remove an incomplete last line, which a killed run may have left.

        Raises:
            UsageError: The file is not a journal, or has the results of other parameters.
            OSError: It cannot be opened.
        """
        self.done: set[str] = set()
        """The pictures that have a line."""
        self._parameters = {name: str(value) for name, value in parameters.items()}
        self._path = path
        for line in self:
            if line.parameters != self._parameters:
                raise UsageError(f"{path} has results with other parameters, {line.parameters}; use another --out, or remove it")
            self.done.add(line.file)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered, so that each line is one call of the system, between which signals come.
        self._file = open(1 if path is None else path, "ab", buffering=0, closefd=path is not None)  # noqa: SIM115
        if path is not None:
            with path.open("rb") as lines:
                self._file.truncate(sum(len(line) for line in lines if line.endswith(b"\n")))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __iter__(self) -> Iterator[Line]:
        """Read the complete lines; there are none on the standard output."""
        if self._path is None or not self._path.exists():
            return
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n") and line.startswith(b'{"file":'[: len(line)]):
                    return
                try:
                    read = msgspec.json.decode(line, type=Line)
                    if PurePath(read.file).is_absolute() or ".." in PurePath(read.file).parts:  # other files are named after it
                        raise ValueError(f"{read.file!r} is outside of the folder")  # noqa: TRY301
                    yield read
                except ValueError as error:  # of msgspec
                    raise UsageError(f"{self._path} is not a result file: line {number}: {error}; use another --out") from error

    def add(self, file: str, result: DetectResult) -> None:
        """Write a line."""
        line = Line(file, result.image, result.model, result.detections, result.request_id, self._parameters)
        left = msgspec.json.encode(line) + b"\n"
        while left:  # a disk that is almost full takes a part, and refuses the rest
            left = left[self._file.write(left) :]
        self.done.add(file)
