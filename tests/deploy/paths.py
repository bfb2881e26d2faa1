"""The paths at which models are asked, by workers and by the process of search."""

from app.api.application import table_of
from app.api.dialects import deepstack_names
from app.api.dialects.dialect import load
from app.api.routes import Target
from app.api.search import routes as search
from app.settings.schema import DIALECTS

_OF_SEARCH = dict(table_of([deepstack_names.DIALECT], search.MODEL_ROUTES).paths)
# A worker only passes paths of search on. What is taken there is what counts.
PATHS: list[tuple[str, Target]] = [
    *((path, target) for path, target in table_of(load(DIALECTS)).paths if path not in _OF_SEARCH),
    *_OF_SEARCH.items(),
]
"""As clients send them, in Litestar's syntax, and their targets."""
