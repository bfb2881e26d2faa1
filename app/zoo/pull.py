"""Pull a model: add a published network."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from app.telemetry.logging import say
from app.zoo.add import Request, add
from app.zoo.recipe import NamedRecipe
from app.zoo.recognize import Options
from app.zoo.registry import PublishedModel
from app.zoo.repository import Repository


def pull(  # noqa: PLR0913 - those of `add` and `download`
    name: str,
    entry: PublishedModel,
    repository: Repository,
    apply: Callable[[str], str] = lambda _: "",
    *,
    source: Path | None = None,
    sha256: str | None = None,
    is_production: bool = False,
) -> str:
    """Add a published network, or the same one again; return what `apply` returns. Errors are those of `download` and `add`."""
    say(f"{name}: {entry.title}")
    say(f"licence: {entry.licence}")
    if entry.note:
        say(f"note: {entry.note}")
    say(f"source: {source or entry.source}")
    recipe = msgspec.structs.asdict(entry.recipe)
    given = {option: recipe[option] for option in recipe.keys() & {*Options.__struct_fields__}}
    task = entry.recipe.task if isinstance(entry.recipe, NamedRecipe) else None
    options = msgspec.convert({"labels": entry.class_names or None, "task": task, **given}, Options)
    request = Request(
        str(source or ""), name, entry.licence, None, options, published=entry, sha256=sha256, is_production=is_production
    )
    return add(request, repository, apply)[1]
