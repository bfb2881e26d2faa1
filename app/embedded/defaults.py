"""The default models, which are neither removed nor unloaded."""

from app import feature
from app.host.program import CommandError
from app.model.reference import split_reference
from app.routing import routes
from app.routing.routes import RoutesError
from app.settings.schema import PREFIX
from app.settings.task_models import default_models


def require_not_default(name: str, version: str = "") -> None:
    """Raise CommandError for a model that answers requests which name none, or for a version of it if a route names that."""
    settings = feature.read_settings()  # with the names of routes
    try:
        known = routes.load(settings.routes_file) if settings.routes_file else {}
    except RoutesError as error:
        raise CommandError(f"{PREFIX}ROUTES_FILE: {error}; mend it first, because {name} may be a default model in it") from error
    for setting, default in default_models(settings).items():
        what, route = f"{name} is a default model of the settings", known.get(default)
        if route is not None:
            target, target_version = split_reference(route.to)
            if target == name and version in {"", target_version}:
                how = f"first give the route another model in {settings.routes_file}"
                raise CommandError(f"{what}: {PREFIX}{setting}={default} is a route to it; {how}")
        elif default == name and not version:
            variable, _, task = setting.partition("=")
            how = f"{task}=NAME in {PREFIX}{variable}" if task else f"{PREFIX}{variable}=NAME"
            raise CommandError(f"{what}; first choose another one: {how}")
