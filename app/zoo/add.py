"""Add a network to the model repository: recognise it, compose its model, check it, and make it the default version."""

import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec
import numpy as np

from app.cascade import catalog
from app.host import archive, sandbox
from app.host.packages import verify_sha256
from app.host.program import CommandError, NotChecked, NotPossible, first_line
from app.imaging.photos import PHOTOS
from app.model.golden import Golden
from app.model.reference import refer_to, split_reference
from app.model.spec import ModelSpec, from_triton_config
from app.telemetry.logging import say
from app.triton.config_file import read_config_file
from app.triton.repository import CONFIG_NAME, last_versions
from app.zoo import check, configs
from app.zoo.build import MIN_F1, build, extract, say_why_fp32, strip_floor, write_half
from app.zoo.description import LABELS, Description, Serving, read_labels
from app.zoo.download import download, fetch_url
from app.zoo.inference import interruptible, open_session, run
from app.zoo.recipe import PIXELS, DetectionRecipe, ObbRecipe, SegmentationRecipe, TextRecognitionRecipe
from app.zoo.recognize import IMAGENET, MAX_MODEL_BYTES, Options, Recognized, read_hints, recognize
from app.zoo.registry import PublishedModel
from app.zoo.repository import NETWORK, PREVIOUS, Repository

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

_PICKLES = {".pt", ".pth", ".pkl"}
_EXPORT = "yolo export model=best.pt format=onnx dynamic=True"
_PACK = "add a zip that has the network and its weights in one folder"
# Production's largest batch of masks and oriented boxes: the gateway's event loop copies the prototypes of all images at once, and
# a million pairs of oriented candidates may be compared for each image.
_HEAVY_BATCH = 8
# Enough images to find a network that cannot run a batch.
_BATCH = 4
# What all versions of a model have in common, because they share its config.
_SHARED = (
    *("task", "size", "resize", "placement", "crop", "interpolation", "pad", "widths"),
    *("iou", "prototypes", "keypoints", "keypoint_names", "dimensions", "landmarks", "match_distance"),
)
_IMAGENET_MEAN, _IMAGENET_STD = (",".join(map(str, IMAGENET[name])) for name in ("mean", "std"))
_SHOWN_LABELS = 8
_MAX_LABELS, _MAX_TEXT = 20_000, 256


class Request(NamedTuple):
    """A network to add."""

    source: str
    """A file, a folder with one ONNX file, an https address, or `-` for the standard input."""
    name: str | None
    """Name of the model; by default that of the file."""
    licence: str
    samples: Path | None
    """Folder of images for the check; None for the photos of the page."""
    options: Options
    is_untrusted: bool = False
    published: PublishedModel | None = None
    """Entry of the registry, which says what the others leave out; without a source, it is downloaded."""
    sha256: str | None = None
    """SHA-256 that the file must have; if None, that of `published`, or any."""
    is_accepted: bool = False
    """Whether to add a detector that finds nothing in `samples`."""
    is_production: bool = False
    """Whether to make the model in FP16 as well, which is made in any case if the versions so far have it."""

    @property
    def title(self) -> str:
        """What messages call the file."""
        return "the file" if self.source == "-" else self.source or (self.published.file_name if self.published else "")


def add(request: Request, repository: Repository, apply: Callable[[str], str]) -> tuple[str, str]:
    """Add a network as a new model or version; return its name and what `apply` returns. After CommandError all is as before."""
    name = request.name or re.sub(r"[^A-Za-z0-9_.-]+", "_", Path(urlsplit(request.source).path).stem)
    load = partial(repository.load, name, is_published=request.published is not None)
    load()  # says what is wrong with the name before a download
    if name in catalog.read(repository.path / catalog.FILE):
        raise CommandError(f"{name} is a cascade; choose another --name, or first: nereid remove {name}")
    with repository.writing(waits=not request.is_untrusted) as scratch:  # the API, which adds untrusted files, does not wait
        with interruptible():
            file = _find(request, scratch)
            if request.sha256 and not request.published:
                verify_sha256(file, request.sha256)
        old = load()
        number = (old.last_version if old else last_versions(repository.path).get(name, 0)) + 1
        work = partial(_prepare, refer_to(name, number), request, file, scratch, old)
        new = sandbox.run(work, Description) if request.is_untrusted else work()
        folder = repository.path / name
        if not new.pixel_model and (request.is_production or (old is not None and configs.runs_half(folder, old))):
            _prepare_half(name, request, scratch, new)
        version = str(new.default_version)
        if old is not None and version in old.versions and not request.published:  # made again; the default stays
            new = msgspec.structs.replace(new, default_version=old.default_version)
        repository.put(name, scratch, new, version)
        if (folder / version / configs.HALF).is_file() and not configs.runs_half(folder, new):
            how = "add their networks again with --production, or remove them"
            say(f"warning: production runs {name} in FP32 until its other versions are in FP16, too: {how}")
        return name, repository.load_into(apply, name, old, scratch / PREVIOUS)


@interruptible()
def _prepare(reference: str, request: Request, file: Path, scratch: Path, old: Description | None) -> Description:
    # Into `scratch`. The reference names the version, unless an old version has the same network.
    content = _read(file, request, scratch)
    recognized = _recognize(content, file, request, old)
    without_floor, batch = _compose(content, recognized, request.title)
    name, _ = split_reference(reference)
    new = _describe(reference, request, recognized, sha256(content).hexdigest(), old, scratch.parent / name)
    if limit := batch or recognized.max_batch:
        embedded, production = (
            msgspec.structs.replace(serving, max_batch=min(limit, serving.max_batch)) for serving in (new.embedded, new.production)
        )
        new = msgspec.structs.replace(new, embedded=embedded, production=production)
    (scratch / NETWORK).write_bytes(build(content, recognized, batch=batch).SerializeToString())
    spec = spec_of(name, new, scratch)
    canvases = check.draw_samples(request.samples or PHOTOS, spec)
    report = _check(open_session(content), without_floor, recognized, canvases, request)
    golden = _run(scratch / NETWORK, new, spec, request.title)
    new = msgspec.structs.replace(new, golden={**new.golden, str(new.default_version): golden})
    reference = refer_to(name, new.default_version)
    if isinstance(new.recipe, DetectionRecipe) and not request.published:
        _say_what_was_checked(reference, request, report, new.recipe)
        version = str(new.default_version)
        others = {number for number in new.unchecked if number != version}
        new = msgspec.structs.replace(new, unchecked=(*sorted(others, key=int), *([] if report.boxes else [version])))
    if old is not None and isinstance(new.recipe, DetectionRecipe):
        previous = scratch.parent / name / str(old.default_version) / NETWORK
        _compare(refer_to(name, old.default_version), previous, reference, scratch / NETWORK, canvases)
    say(_summary(reference, new, report, is_single=bool(batch)))
    return new


def _prepare_half(name: str, request: Request, scratch: Path, new: Description) -> None:
    # Also if this takes too long, the model is added.
    work = partial(_write_half, name, scratch, new, request.samples)
    try:
        reason = sandbox.run(work, str) if request.is_untrusted else work()
    except CommandError as error:
        reason = str(error)
    say_why_fp32(refer_to(name, new.default_version), reason)


@interruptible()
def _write_half(name: str, scratch: Path, new: Description, samples: Path | None) -> str:
    content, recognized = extract(scratch / NETWORK, new)
    canvases = check.draw_samples(samples or PHOTOS, spec_of(name, new, scratch))
    return write_half(scratch / configs.HALF, content, recognized, canvases)


def _find(request: Request, scratch: Path) -> Path:
    source = request.source
    if request.published:
        return download(request.published, scratch, source=Path(source) if source else None, sha256=request.sha256)
    if source.startswith("https://"):
        return fetch_url(source, scratch / "network.onnx")
    if source == "-":
        with (path := scratch / "network.onnx").open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        return path
    path = Path(source)
    files = sorted(path.glob("*.onnx")) if path.is_dir() else [path]
    if len(files) != 1:
        raise CommandError(f"{path} contains {len(files)} files *.onnx; name one file")
    if not files[0].is_file():
        raise CommandError(f"there is no file {files[0]}")
    if files[0].suffix in _PICKLES:
        raise CommandError(f"{files[0]} is a pickle of PyTorch, which can run any code and is never opened; export it: {_EXPORT}")
    return files[0]


def _read(file: Path, request: Request, scratch: Path) -> bytes:
    try:
        import onnx  # noqa: PLC0415 - heavy, and not installed if only the API runs
        import onnxruntime  # noqa: F401, PLC0415

        from app.zoo.compose import load_network, missing_weights, tensors_in, use_known_names  # noqa: PLC0415
    except ImportError as error:
        raise NotPossible("onnx and onnxruntime are not installed; use ./just, or install nereid-gateway[models]") from error
    try:
        if not request.published and archive.is_zip(file):
            file = archive.unpack(file, scratch / "unpacked", ".onnx", missing_weights, MAX_MODEL_BYTES)
        network = load_network(file, request.published.recipe.architecture if request.published else None)
        onnx.checker.check_model(network)
        weights = {tensor.name for tensor in network.graph.initializer}
        for value in [value for value in network.graph.input if value.name in weights]:  # as in old files
            network.graph.input.remove(value)
        use_known_names(network)
        content = bytes(network.SerializeToString())
    except OSError as error:
        name = not file.is_relative_to(scratch) and error.filename
        raise CommandError(f"{name or request.title} cannot be read: {error.strerror or error}") from error
    except MemoryError:
        raise
    except CommandError as error:
        raise CommandError(f"{request.title}: {error}; {_EXPORT}") from error
    except Exception as error:  # onnx has its own exception for every kind of broken file
        if names := missing_weights(file):
            where = _printable(", ".join(names))[:_MAX_TEXT]
            advice = _PACK if file.is_relative_to(scratch) else f"put it there, or {_PACK}"
            raise CommandError(f"{request.title} has its weights in {where}, not beside it: {advice}") from error
        text = f"{request.title} is not a complete ONNX network: {first_line(error)}; {_EXPORT}"
        raise CommandError(text.replace(f"{scratch}/", "")) from error
    if any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in tensors_in(network)):  # which ONNX Runtime would read
        raise CommandError(f"{request.title} has weights in other files where onnx does not expect them; {_EXPORT}")
    return content


def _recognize(content: bytes, file: Path, request: Request, old: Description | None) -> Recognized:
    import onnx  # noqa: PLC0415

    network = onnx.load_from_string(content)
    beside, options = file.with_name(LABELS), request.options
    if options.labels is None and beside.is_file() and not read_hints(network).class_names():
        options = msgspec.structs.replace(options, labels=read_labels(beside))
    try:
        found = recognize(network, options)
    except ValueError as error:
        raise CommandError(f"{request.title}: {error}") from error
    match found.recipe, old and old.recipe:
        case DetectionRecipe(), DetectionRecipe(iou=iou) if options.iou is None:  # defaults of heads differ, and may change
            found = found._replace(recipe=msgspec.structs.replace(found.recipe, iou=iou))
    recipe = request.published.recipe if request.published else found.recipe
    is_square = old is not None and old.recipe.shapes != recipe.shapes  # all versions share a config
    return found._replace(recipe=msgspec.structs.replace(recipe, shapes=()) if is_square else recipe)


def _compose(content: bytes, recognized: Recognized, title: str) -> "tuple[InferenceSession, int | None]":
    # Without a floor and with one class for each box. 1: a network of a fixed batch takes one image at a time.
    reason = ""
    for batch in (None, 1):
        try:
            session = open_session(build(content, strip_floor(recognized), batch=batch))
            if check.separates_images(session, recognized.recipe.size, batch or 2):
                return session, batch
            reason = "the network mixes the images of a batch"
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - onnx and onnxruntime have their own exceptions
            reason = first_line(error)
    raise CommandError(f"{title} cannot be composed: {reason}; {_EXPORT}")


def _compare(old: str, file: Path, new: str, model: Path, canvases: Sequence[check.Canvas]) -> None:
    try:
        session = open_session(file)
    except Exception as error:  # noqa: BLE001 - onnxruntime has its own exception for every kind of broken file
        say(f"warning: {old} cannot be loaded, and is not compared: {first_line(error)}")
        return
    agreeing, total = check.compare(session, open_session(model), canvases)
    say(f"{new} and {old} agree in {agreeing} of {total} boxes of the samples")


def _describe(  # noqa: PLR0913, PLR0917 - what is known of the network, and of the model in its folder
    reference: str, request: Request, recognized: Recognized, digest: str, old: Description | None, folder: Path
) -> Description:
    name, number = split_reference(reference)
    entry, licence = request.published, _printable(request.licence or recognized.licence)
    name_of_file = "" if request.source == "-" else Path(urlsplit(request.source).path).name
    labels, source = tuple(map(_printable, recognized.labels)), _printable(entry.source if entry else name_of_file)
    # Before its characters, a recogniser of text has the blank.
    if "" in labels[isinstance(recognized.recipe, TextRecognitionRecipe) :]:
        raise CommandError(f"class {labels.index('')} of {request.title} has no name: say --labels with a name for each class")
    if len(labels) > _MAX_LABELS or max(map(len, (*labels, licence))) > _MAX_TEXT:
        limit = f"{_MAX_LABELS} classes, with names of up to {_MAX_TEXT} characters, and a licence as long"
        raise CommandError(f"{request.title} has more than {limit}")
    if old is None:
        is_heavy = isinstance(recognized.recipe, SegmentationRecipe | ObbRecipe)
        production = (entry and entry.production) or (Serving(max_batch=_HEAVY_BATCH) if is_heavy else None)
        more: dict[str, Any] = {"production": production} if production else {}
        return Description(
            **more,
            labels=labels,
            licence=licence or "unknown",
            source=source,
            default_version=int(number),
            pixel_model=entry.pixel_model if entry else None,
            recipe=recognized.recipe,
            versions={number: digest},
            last_version=int(number),
        )
    for version, known in reversed(old.versions.items()):
        if known == digest and old.recipe == recognized.recipe and (entry or old.labels == labels):
            lacks_half = request.is_production and not (folder / version / configs.HALF).is_file()
            if entry or lacks_half or version in old.unchecked:
                return msgspec.structs.replace(old, default_version=int(version))
            reference = refer_to(name, version)
            raise CommandError(f"{reference} is this very file; to make it the default version: nereid use {reference}")
    shared = [tuple(getattr(recipe, field, None) for field in _SHARED) for recipe in (old.recipe, recognized.recipe)]
    differing = [f"another {field}" for field, one, other in zip(_SHARED, *shared, strict=True) if one != other]
    if differing or old.labels != labels:
        what = differing[0] if differing else "other classes"
        raise CommandError(f"{request.title} has {what} than {name}; add it with another --name, or first: nereid remove {name}")
    return msgspec.structs.replace(
        old,
        licence=licence or old.licence,
        source=source,
        default_version=int(number),
        last_version=int(number),
        recipe=recognized.recipe,
        versions={**old.versions, number: digest},
    )


def spec_of(name: str, new: Description, scratch: Path) -> ModelSpec:
    """Return the spec that the gateway will derive from the generated config; for a model of files, that of its pixels."""
    path, new = scratch / "config.pbtxt", msgspec.structs.replace(new, pixel_model=None)
    path.write_text(configs.generate(name, new)[Path("configs", f"{CONFIG_NAME}.pbtxt")], encoding="utf-8")
    return from_triton_config(read_config_file(path), str(new.default_version))


def _run(model: Path, new: Description, spec: ModelSpec, title: str) -> Golden:
    # On a blank image, as the embedded Triton runs it when it loads it, and on several at once if it may get them.
    try:
        session = open_session(model)
        for width, height in (new.recipe.size, *new.recipe.shapes):
            for images in {1, min(_BATCH, new.production.max_batch)}:
                run(session, {"image": np.zeros((images, height, width, 3), np.uint8)})
        return check.golden(session, spec)
    except MemoryError:
        raise
    except Exception as error:  # onnxruntime has its own exceptions
        raise CommandError(f"{title} does not run on blank images: {first_line(error)}; {_EXPORT}") from error


def _check(
    network: "InferenceSession",
    model: "InferenceSession",
    recognized: Recognized,
    canvases: Sequence[check.Canvas],
    request: Request,
) -> check.Report:
    recipe, labels = recognized.recipe, len(recognized.labels)
    report = check.check(network, model, recipe, labels, canvases)
    if not report.is_plausible:
        text = "its scores are not between 0 and 1, or its boxes far outside of the image; is its head"
        raise CommandError(f"{text} {recipe.head}, and was it exported with its sigmoid?")
    if report.classes > labels:
        raise CommandError(f"it found class {report.classes - 1}, but there are {labels} labels, from 0: say --labels a,b,c")
    if report.f1 < MIN_F1:
        raise CommandError(
            f"the composed model and the network agree only in {report.f1:.1%} of a sample's results; is its head {recipe.head}?"
        )
    if report.has_shares and not (request.options.head or request.published):
        raise CommandError(
            f"{request.title} gives numbers from 0 to 1: say --head probabilities, or --head logits if softmax follows"
        )
    if report.has_fractions and recipe.head in PIXELS:
        raise CommandError(f"{request.title} has boxes in fractions of the input: say --box-units normalized")
    return report


def _say_what_was_checked(reference: str, request: Request, report: check.Report, recipe: DetectionRecipe) -> None:
    if report.boxes >= check.MIN_BOXES:
        return
    if report.boxes:
        say(f"checked on {report.boxes} boxes; give --samples FOLDER of your own pictures to see more")
        return
    options = [
        f"--channels {'RGB' if recipe.channels == 'BGR' else 'BGR'}",
        f"--scale {255 if recipe.scale == 1 else 1}",
        f"--resize {'letterbox' if recipe.resize == 'stretch' else 'stretch'}",
        *([] if any(recipe.mean) else [f"--mean {_IMAGENET_MEAN} --std {_IMAGENET_STD}"]),
    ]
    hint = f"if it should, try {', '.join(options)}, or another --head"
    if request.samples and not request.is_accepted:
        raise NotChecked(f"{request.title} finds nothing in the pictures in {request.samples}; {hint}; --accept adds it as it is")
    built_in = "the photos that are built in: give --samples FOLDER of pictures with its objects"
    where = f"the pictures in {request.samples}" if request.samples else built_in
    say(f"warning: {reference} is not checked, because it finds nothing in {where}; {hint}")


def _summary(reference: str, new: Description, report: check.Report, *, is_single: bool) -> str:
    recipe = new.recipe
    shown, (width, height) = [label for label in new.labels if label.strip()], recipe.size
    classes = f"{len(new.labels)} classes ({', '.join(shown[:_SHOWN_LABELS])}{', ...' * (len(shown) > _SHOWN_LABELS)})"
    if not new.labels:
        classes = ", ".join(f"{kind} {name} {[*shape]}" for name, (kind, shape) in recipe.outputs.items())
    pixels = f"{recipe.channels} / {recipe.scale:g}{' with mean and std' if any(recipe.mean) else ''}"
    alone = ", one image at a time (export with dynamic=True for batches)" if is_single else ""
    return (
        f"{reference}: {recipe.task}, {classes}, {width} x {height}{' and rectangles' * bool(recipe.shapes)}, {pixels}, "
        f"{report.milliseconds:.0f} ms here, licence {new.licence}{alone}"
    )


def _printable(text: str) -> str:  # Chinese texts have a space of their own
    return "".join(character if character.isprintable() or character == "\u3000" else "?" for character in text)
