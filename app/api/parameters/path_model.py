"""A model in the path: its task tells which parameters a request may have, and Triton may have to be asked for that."""

from app.api.parameters.parse import Parameters, names, parse_parameters
from app.api.parameters.tasks import FORMS
from app.api.receiving.intake import Pairs
from app.model.spec import ModelSpec
from app.pipeline.pipeline import Pipeline
from app.resilience.deadline import Deadline


class _CommonParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Those of every task."""

    url: str | None = None


class PathModel:
    """Knows what the query says whatever the task of its model, and finds out the task."""

    def __init__(self, name: str, query: Pairs, pipeline: Pipeline) -> None:
        """Refer to the model of that name, in the version that the query says.

        Raises:
            UnknownModel: No model can have this name.
            InvalidParameter: As `parse_parameters` says, of parameters that every task has.
        """
        common = [("model", name), *(pair for pair in query if pair[0] in names(_CommonParameters))]
        self.common: Parameters = parse_parameters(common, _CommonParameters)
        """The parameters of every task."""
        self._reference = pipeline.refer_to(name, self.common.version)
        self._pipeline = pipeline

    @property
    def kind(self) -> type[Parameters] | None:
        """The parameters of its requests; None if Triton must be asked."""
        spec = self._pipeline.cached(self._reference)
        return None if spec is None else _kind_of(spec)

    async def find_kind(self, deadline: Deadline) -> type[Parameters]:
        """Return the parameters of its requests.

        Raises:
            GatewayError: As `Pipeline.prepare` says.
        """
        return _kind_of(await self._pipeline.prepare(self._reference, deadline))


def _kind_of(spec: ModelSpec) -> type[Parameters]:
    return FORMS[spec.head.task].parameters
