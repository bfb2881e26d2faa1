"""The response to a batch as one list of COCO results."""

from collections.abc import Sequence

import msgspec

from app.api.answering.coco_results import to_results
from app.api.batch.answer import BatchAnswer, copy_error, first_error
from app.api.context import RequestContext
from app.pipeline.call import Detections
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing


class CocoAnswer(BatchAnswer):
    """Collects the results of all images. One failure fails the batch: the list cannot tell it from an image without objects."""

    def __init__(self, names: list[str | None], image_ids: Sequence[int], context: RequestContext, metrics: Metrics) -> None:
        """Prepare the response for images with these file names and image ids."""
        super().__init__(names, "coco", context, metrics)
        self._image_ids = image_ids
        self._lists: dict[int, bytes] = {}
        self._errors: dict[int, Exception] = {}

    def add(self, index: int, found: Detections | Exception, timing: Timing) -> None:
        """Add the results of an image."""
        if isinstance(found, Exception):
            self.count_failure(found, timing)
            self._errors[index] = copy_error(found)
        else:
            self.count(found, timing)
            self._lists[index] = msgspec.json.encode(to_results(found, self._image_ids[index]))

    def document(self) -> bytes:
        """Encode the results of all images.

        Raises:
            GatewayError: An image failed. It is the error of the first failed image, and its detail names the index.
            RuntimeError: The first failure was an unexpected exception.
        """
        if self._errors:
            raise first_error(self._errors, len(self._image_ids))
        without_brackets = (self._lists[index][1:-1] for index in sorted(self._lists))
        return b"[%b]" % b",".join(filter(None, without_brackets))
