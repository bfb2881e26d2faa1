"""Add a user's own network to the model repository: recognise it, compose its model, check it, and make it the default version."""

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from app.detection.nms import MIN_SCORE
from app.host.program import CommandError
from app.model.reference import refer_to
from app.model.spec import ModelSpec, from_triton_config
from app.telemetry.logging import say
from app.triton.config_file import read_config_file
from app.zoo import check, configs
from app.zoo.description import LABELS, Description, Serving, read_labels
from app.zoo.download import fetch_url
from app.zoo.recipe import FRACTIONS, DetectionRecipe
from app.zoo.recognize import Options, Recognized, recognize
from app.zoo.repository import NETWORK, Repository

if TYPE_CHECKING:
    import onnx
    import onnxruntime

_MIN_F1 = 0.99
_PICKLES = {".pt", ".pth", ".pkl"}
_EXPORT = "yolo export model=best.pt format=onnx dynamic=True"
# What all versions of a model have in common, because they share its config.
_SHARED = ("size", "resize", "placement", "crop")
_SHOWN_LABELS = 8


class Request(NamedTuple):
    """A network to add."""

    source: str
    """A file, a folder with one ONNX file, or an https address."""
    name: str | None
    """Name of the model; by default that of the file."""
    licence: str
    samples: Path
    """Folder of images for the check."""
    options: Options


def read_options(given: Mapping[str, Any]) -> Options:
    """Read the options of the command line.

    Raises:
        CommandError: One is not valid.
    """
    texts = {name: given[name] for name in Options.__struct_fields__ if given.get(name) is not None}
    if "labels" in texts:
        path = Path(texts["labels"])
        texts["labels"] = read_labels(path) if path.suffix == ".txt" else [label.strip() for label in texts["labels"].split(",")]
    if "size" in texts:
        sides = texts["size"].split("x")
        texts["size"] = sides if len(sides) > 1 else sides * 2
    texts |= {name: texts[name].split(",") for name in texts.keys() & {"mean", "std"}}
    try:
        return msgspec.convert(texts, Options, strict=False)
    except msgspec.ValidationError as error:
        raise CommandError(f"an option is not valid: {error}") from error


def add(request: Request, repository: Repository) -> tuple[str, Description | None]:
    """Add a network as a new model, or as the next version of an added one; return its name and its previous description.

    Raises:
        CommandError: It cannot be added; nothing has changed.
    """
    name = request.name or re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(request.source).stem)
    repository.load(name)  # says what is wrong with the name before a download
    with repository.writing() as scratch:
        file = _find(request.source, scratch)
        content = _read(file)
        recognized = _recognize(content, file, request.options)
        model, has_batches = _compose(content, recognized, file)
        old = repository.load(name)
        new = _describe(name, request, recognized, sha256(content).hexdigest(), old)
        if not has_batches:
            new = msgspec.structs.replace(new, embedded=Serving(max_batch=1), production=Serving(max_batch=1))
        (scratch / NETWORK).write_bytes(model.SerializeToString())
        canvases = check.draw_samples(request.samples, _spec(name, new, scratch))
        report = _check(content, recognized, None if has_batches else 1, canvases)
        reference = refer_to(name, new.default_version)
        if report.boxes < check.MIN_BOXES and isinstance(new.recipe, DetectionRecipe):
            say(f"checked on {report.boxes} boxes; give --samples FOLDER of your own pictures to see more")
        if report.has_fractions and new.recipe.head in FRACTIONS:
            say("warning: boxes look like fractions of the input; if so: nereid add ... --box-units normalized")
        if old is not None and isinstance(new.recipe, DetectionRecipe):
            previous = repository.path / name / str(old.default_version) / NETWORK
            agreeing, total = check.compare(_open(previous), check.open_session(model), canvases)
            say(f"{reference} and {refer_to(name, old.default_version)} agree in {agreeing} of {total} boxes of the samples")
        repository.put(name, scratch / NETWORK, new)
    say(_summary(reference, new, report, has_batches=has_batches))
    return name, old


def _find(source: str, scratch: Path) -> Path:
    """Return the path of the file that a source names; download it if necessary."""
    if source.startswith("https://"):
        return fetch_url(source, scratch / "network.onnx")
    path = Path(source)
    files = sorted(path.glob("*.onnx")) if path.is_dir() else [path]
    if len(files) != 1:
        raise CommandError(f"{path} contains {len(files)} files *.onnx; name one file")
    if not files[0].is_file():
        raise CommandError(f"there is no file {files[0]}")
    if files[0].suffix in _PICKLES:
        raise CommandError(f"{files[0]} is a pickle of PyTorch, which can run any code and is never opened; export it: {_EXPORT}")
    return files[0]


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}") from error


def _recognize(content: bytes, file: Path, options: Options) -> Recognized:
    try:
        import onnx  # noqa: PLC0415 - heavy, and not installed if only the API runs
        import onnxruntime  # noqa: F401, PLC0415
    except ImportError as error:
        raise CommandError("onnx and onnxruntime are not installed; use ./just add, or run: pip install '.[models]'") from error
    try:
        network = onnx.load_from_string(content)
        onnx.checker.check_model(network)
    except Exception as error:  # onnx has its own exception for every kind of broken file
        raise CommandError(f"{file} is not a complete ONNX network: {_first_line(error)}; {_EXPORT}") from error
    beside, metadata = file.with_name(LABELS), {entry.key: entry.value for entry in network.metadata_props}
    if options.labels is None and not metadata.get("names") and beside.is_file():
        options = msgspec.structs.replace(options, labels=read_labels(beside))
    try:
        return recognize(network, options)
    except ValueError as error:
        raise CommandError(f"{file}: {error}") from error


def _compose(content: bytes, recognized: Recognized, file: Path) -> "tuple[onnx.ModelProto, bool]":
    """Return the model, and whether it takes batches; one image at a time if the network has a fixed batch."""
    reason = ""
    for batch in (None, 1):
        try:
            model = _build(content, recognized, batch=batch)
            if not check.separates_images(model, recognized.recipe.size, batch or 2):
                raise ValueError("the network mixes the images of a batch")  # noqa: TRY301 - as its other faults
        except Exception as error:  # noqa: BLE001 - onnx and onnxruntime have their own exceptions
            reason = _first_line(error)
        else:
            return model, batch is None
    raise CommandError(f"{file} cannot be composed: {reason}; {_EXPORT}")


def _build(content: bytes, recognized: Recognized, *, batch: int | None, floor: float = MIN_SCORE) -> "onnx.ModelProto":
    import onnx  # noqa: PLC0415

    from app.zoo.compose import compose_model  # noqa: PLC0415

    network = onnx.load_from_string(content)
    return compose_model(
        network, recognized.recipe, shapes=recognized.shapes, batch=batch, floor=floor, classes=len(recognized.labels)
    )


def _open(previous: Path) -> "onnxruntime.InferenceSession":
    try:
        return check.open_session(previous)
    except Exception as error:  # onnxruntime has its own exception for every kind of broken file
        raise CommandError(f"{previous}, the default version, cannot be loaded: {_first_line(error)}") from error


def _describe(name: str, request: Request, recognized: Recognized, digest: str, old: Description | None) -> Description:
    """Return the description with this network as the default version."""
    if old is None:
        return Description(
            labels=recognized.labels,
            licence=request.licence or recognized.licence or "unknown",
            source=Path(request.source).name,
            default_version=1,
            recipe=recognized.recipe,
            versions={"1": digest},
            last_version=1,
        )
    for version, known in old.versions.items():
        if known == digest:
            reference = refer_to(name, version)
            raise CommandError(f"{reference} is this very file; to make it the default version: nereid use {reference}")
    differing = [field for field in _SHARED if getattr(old.recipe, field) != getattr(recognized.recipe, field)]
    if type(old.recipe) is not type(recognized.recipe) or old.labels != recognized.labels or differing:
        what = (
            "another task"
            if type(old.recipe) is not type(recognized.recipe)
            else f"another {differing[0]}"
            if differing
            else "other classes"
        )
        raise CommandError(f"{request.source} has {what} than {name}; add it with another --name, or first: nereid remove {name}")
    number = old.last_version + 1
    return msgspec.structs.replace(
        old,
        licence=request.licence or recognized.licence or old.licence,
        source=Path(request.source).name,
        default_version=number,
        last_version=number,
        recipe=recognized.recipe,
        versions={**old.versions, str(number): digest},
    )


def _spec(name: str, new: Description, scratch: Path) -> ModelSpec:
    """Return the spec that the gateway will derive from the generated config."""
    path = scratch / "config.pbtxt"
    path.write_text(configs.generate(name, new)[Path("config.pbtxt")], encoding="utf-8")
    return from_triton_config(read_config_file(path), str(new.default_version))


def _check(content: bytes, recognized: Recognized, batch: int | None, canvases: Sequence[check.Canvas]) -> check.Report:
    """Check the model; raise `CommandError` if it finds something else than the network."""
    without_floor = _build(content, recognized, batch=batch, floor=0.0)
    report = check.check(
        check.open_session(content), check.open_session(without_floor), recognized.recipe, len(recognized.labels), canvases
    )
    if report.f1 < _MIN_F1:
        head = recognized.recipe.head
        raise CommandError(
            f"the composed model and the network agree in {report.f1:.1%} of a sample's boxes only; is its head {head}?"
        )
    return report


def _summary(reference: str, new: Description, report: check.Report, *, has_batches: bool) -> str:
    task = "detection" if isinstance(new.recipe, DetectionRecipe) else "classification"
    more = ", ..." if len(new.labels) > _SHOWN_LABELS else ""
    labels, (width, height) = ", ".join(new.labels[:_SHOWN_LABELS]) + more, new.recipe.size
    alone = "" if has_batches else ", one image at a time (export with dynamic=True for batches)"
    return (
        f"{reference}: {task}, {len(new.labels)} classes ({labels}), {width} x {height}, {report.milliseconds:.0f} ms here, "
        f"licence {new.licence}{alone}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
