"""Compose all models of a repository again from the networks in them, as this program composes models, with the same results."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from app.host.program import CommandError, first_line
from app.model.golden import SAMPLE
from app.model.reference import refer_to
from app.telemetry.logging import say
from app.triton.repository import model_folders
from app.zoo import check, configs
from app.zoo.add import spec_of
from app.zoo.build import build, extract, say_why_fp32, write_half
from app.zoo.inference import interruptible, open_session, run
from app.zoo.repository import NETWORK, PREVIOUS, Repository

_EXPORT = "add its network again"


def rebuild(repository: Repository, apply: Callable[[str], str], *, is_production: bool) -> bool:
    """Compose all models again that have a description, and say what became of each.

    A model whose results would differ stays as it is, with all its versions. The others keep the numbers of their versions.

    Args:
        repository: The repository.
        apply: As for `add`.
        is_production: Whether each model gets a graph in FP16; those that have one keep it in any case.

    Returns:
        Whether none of them had to stay as it was.
    """
    models, is_complete = repository.models(), True
    if not models:
        say(f"there are no models with a description in {repository.path}")
    for folder in model_folders(repository.path):
        if folder.name not in models and any(folder.glob(f"[0-9]*/{NETWORK}")):
            say(f"{folder.name} has no valid model.toml, and stays as it is")
    for name in models:
        try:
            later = _rebuild(name, repository, apply, is_production=is_production)
            say(f"{name} is rebuilt {later}".rstrip())
        except CommandError as error:
            say(f"{name} stays as it is: {error}")
            is_complete = False
    return is_complete


def _rebuild(name: str, repository: Repository, apply: Callable[[str], str], *, is_production: bool) -> str:
    with repository.writing(waits=True) as scratch:
        found = repository.load(name)
        if found is None:
            raise CommandError("it was removed meanwhile")
        folder = repository.path / name
        makes_half = not found.pixel_model and (is_production or configs.runs_half(folder, found))
        spec = spec_of(name, found, scratch)
        canvases, golden = check.draw_samples(check.SAMPLES, spec), {}
        for version in found.versions:
            prepared = scratch / name / version
            prepared.mkdir(parents=True)
            reference = refer_to(name, version)
            try:
                with interruptible():
                    content, recognized = extract(folder / version / NETWORK, found)
                    model = build(content, recognized, batch=1).SerializeToString()
                    is_same = _find_same(folder / version / NETWORK, model, canvases)
                    golden[version] = check.golden(open_session(model), spec)
                    reason = write_half(prepared / configs.HALF, content, recognized, canvases) if makes_half else ""
            except Exception as error:  # onnx and onnxruntime have their own exceptions
                raise CommandError(f"{reference} cannot be composed: {first_line(error)}; {_EXPORT}") from error
            if not is_same:
                raise CommandError(f"{reference} would find something else, perhaps because its head is another; {_EXPORT}")
            (prepared / NETWORK).write_bytes(model)
            say_why_fp32(reference, reason)
        repository.replace(name, scratch, msgspec.structs.replace(found, golden=golden))
        return repository.load_into(apply, name, found, scratch / PREVIOUS)


def _find_same(old: Path, new: bytes, canvases: Sequence[check.Canvas]) -> bool:
    """Return whether two models give the same results for all images."""
    sessions = open_session(old), open_session(new)
    for canvas in canvases:
        one, other = (run(session, {"image": canvas[None]}) for session in sessions)
        if one.keys() - {SAMPLE} != other.keys() - {SAMPLE} or not all(
            np.allclose(one[name], other[name], 1e-3, 1e-3) for name in one.keys() & other.keys()
        ):
            return False
    return True
