"""What the commands say of added models."""

from collections.abc import Iterator, Mapping

from app.cascade import catalog
from app.zoo.repository import Repository


def describe_models(repository: Repository, usage: Mapping[str, str]) -> Iterator[str]:
    """Describe each added model, with what the running Triton says of it, by name, and each cascade, in a line."""
    for name, model in repository.models().items():
        width, height = model.recipe.size
        notes = dict.fromkeys(model.unchecked, ", not checked")
        default = {str(model.default_version): "default"}
        marks = {number: f"{default.get(number, '')}{notes.get(number, '')}".removeprefix(", ") for number in model.versions}
        versions = ", ".join(f"{number} ({mark})" if mark else number for number, mark in marks.items())
        kind = f"{len(model.labels)} classes" if model.labels else model.recipe.task
        yield f"{name}: {kind}, {width} x {height}, licence {model.licence}, versions {versions}{usage.get(name, '')}"
    for name, cascade in catalog.read(repository.path / catalog.FILE).items():
        yield f"{name}: cascade, {cascade.description}"


def name_user(name: str, repository: Repository) -> str:
    """Name the route of a model, or what asks a model that /predict refuses."""
    model = repository.load(name)
    is_step = model is not None and model.recipe.task.startswith("text_")
    return "a cascade, such as POST /ocr/predict," if is_step else f"POST /predict/{name}"
