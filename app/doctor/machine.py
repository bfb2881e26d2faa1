"""Checks of the installation: the image libraries, the model repository."""

import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from PIL import features

from app.doctor.finding import Finding, failure, ok, warning
from app.host import extras
from app.host.packages import has_pillow_simd
from app.settings.schema import Settings
from app.settings.task_models import task_models
from app.triton.repository import loadable_models
from app.zoo import registry

_FORMATS = {"jpg": "libjpeg-turbo", "zlib": "zlib", "webp": "libwebp"}
# By the code of the finding: module, package and purpose.
_LIBRARIES = (
    ("jpeg_decoder", "simplejpeg", "simplejpeg", "decodes JPEGs with libjpeg-turbo"),
    ("opencv", "cv2", "opencv-python-headless", "resizes images"),
)


def check(settings: Settings) -> Iterator[Finding]:
    """Check this machine."""
    yield check_pillow()
    yield from _check_formats()
    yield from _check_libraries()
    yield from _check_extras(settings)
    yield _check_repository(settings)


def check_pillow() -> Finding:
    """Check whether pillow-simd, which is compiled where it is installed, is there; the API also runs with the stock Pillow."""
    version = features.version("pil")
    if has_pillow_simd():
        return ok("pillow", f"pillow-simd {version} is installed")
    return warning(
        "pillow",
        f"stock Pillow {version} is installed, which resizes images for classifiers more slowly than pillow-simd",
        "on x86-64: apt-get install gcc python3-dev libjpeg-dev zlib1g-dev libwebp-dev; "
        "then rm -r .venv && ./just, or pip uninstall -y pillow && pip install --force-reinstall --no-deps pillow-simd",
    )


def _check_formats() -> Iterator[Finding]:
    fix = "apt-get install libjpeg-dev zlib1g-dev libwebp-dev && rm -r .venv && ./just"
    missing = [library for name, library in _FORMATS.items() if not features.check(name)]
    if missing:
        yield failure("image_formats", f"Pillow was compiled without {' and '.join(missing)}", fix)
    else:
        yield ok("image_formats", "Pillow decodes JPEG, PNG and WebP")
    if features.check("jpg") and not features.check("libjpeg_turbo"):
        yield warning("pillow_jpeg", "Pillow decodes CMYK and unusual JPEGs without libjpeg-turbo, several times slower", fix)


def _check_libraries() -> Iterator[Finding]:
    for code, module, package, purpose in _LIBRARIES:
        try:
            version = import_module(module).__version__
        except ImportError as error:
            text = f"{package}, which {purpose}, cannot be imported, and the API does not start: {error}"
            yield failure(code, text, f"rm -r .venv && ./just, or pip install --force-reinstall {package}")
        else:
            yield ok(code, f"{package} {version} {purpose}")


def _check_extras(settings: Settings) -> Iterator[Finding]:
    # Those that no setting needs, but a model.
    for extra, task, purpose in (("ocr", "text_detection", "finding text"), ("masks", "segmentation", "encoding masks as RLE")):
        if text := extras.lack(extra, purpose):
            if os.path.isdir(Path(settings.model_repository, task_models(settings)[task])):  # noqa: PTH112 - Path's raises if it is not readable
                yield warning(extra, text, extras.command(extra))
            else:
                yield ok(extra, f"{text}; {extras.command(extra)}")


def _check_repository(settings: Settings) -> Finding:
    repository = Path(settings.model_repository)
    try:
        models = loadable_models(repository)
    except OSError as error:
        text = f"{error.filename or repository}: {error.strerror}"
        if settings.triton_endpoints and not settings.triton_loads_models:
            return ok("model_repository", f"{text}; it is not needed: Triton reads its own")
        return failure("model_repository", text, "let this user read the model repository")
    text = f"the model repository {repository.absolute()} has {', '.join(models) or 'no model that was pulled'}"
    known = registry.load()
    if settings.triton_endpoints or settings.model in models:
        return ok("model_repository", text)
    if settings.model in known:
        return ok("model_repository", f"{text}; serve pulls {settings.model} when it starts")
    fix = f"NEREID_MODEL=NAME, one of {', '.join({**dict.fromkeys(models), **known})}; or add {settings.model} to the repository"
    return failure("model_repository", f"{text}, and {settings.model} is neither among them nor known to pull", fix)
