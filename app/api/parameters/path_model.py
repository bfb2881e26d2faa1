"""A model in the path. Its task, which Triton may have to be asked for, determines the valid parameters."""

from app.api.parameters.parse import Pairs, Parameters, names, parse_parameters
from app.api.parameters.tasks import FORMS
from app.model.spec import ModelSpec
from app.pipeline.pipeline import Pipeline
from app.resilience.deadline import Deadline


class _CommonParameters(Parameters, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parameters that all tasks share."""

    url: str | None = None


class PathModel:
    """Parses the parameters in the query that all tasks share, and finds out the task of the model."""

    def __init__(self, name: str, query: Pairs, pipeline: Pipeline) -> None:
        """Refer to the model with this name, in the version that the query names.

        Raises:
            UnknownModel: No model can have this name.
            InvalidParameter: As for `parse_parameters`, for the parameters that all tasks share.
        """
        common = [("model", name), *(pair for pair in query if pair[0] in names(_CommonParameters))]
        self.common: Parameters = parse_parameters(common, _CommonParameters)
        """The parameters that all tasks share."""
        self._reference = pipeline.refer_to(name, self.common.version)
        self._pipeline = pipeline

    @property
    def kind(self) -> type[Parameters] | None:
        """The type of the parameters; None if Triton must be asked for the task."""
        spec = self._pipeline.cached(self._reference)
        return None if spec is None else _kind_of(spec)

    async def find_kind(self, deadline: Deadline) -> type[Parameters]:
        """Return the type of the parameters; ask Triton for the task if necessary.

        Raises:
            GatewayError: As for `Pipeline.prepare`.
        """
        return _kind_of(await self._pipeline.prepare(self._reference, deadline))


def _kind_of(spec: ModelSpec) -> type[Parameters]:
    return FORMS[spec.head.task].parameters
