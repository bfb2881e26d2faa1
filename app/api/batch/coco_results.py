"""Describe what was found in the images of a batch in one list of COCO results."""

from collections.abc import Sequence

import msgspec

from app.api.answering.coco_results import to_results
from app.api.batch.answer import BatchAnswer, copy_error, first_error
from app.api.context import RequestContext
from app.pipeline.call import Detections
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing


class CocoAnswer(BatchAnswer):
    """Describes all images, or none: a list of results cannot tell an image that failed from one in which nothing was found."""

    def __init__(self, names: list[str | None], image_ids: Sequence[int], context: RequestContext, metrics: Metrics) -> None:
        """Describe images with these file names and numbers."""
        super().__init__(names, "coco", context, metrics)
        self._image_ids = image_ids
        self._lists: dict[int, bytes] = {}
        self._errors: dict[int, Exception] = {}

    def add(self, index: int, found: Detections | Exception, timing: Timing) -> None:
        """Describe the objects in an image."""
        if isinstance(found, Exception):
            self.count_failure(found, timing)
            self._errors[index] = copy_error(found)
        else:
            self.count(found, timing)
            self._lists[index] = msgspec.json.encode(to_results(found, self._image_ids[index]))

    def document(self) -> bytes:
        """Describe the objects in all images.

        Raises:
            GatewayError: An image has failed: the first one's error, which says which image it is.
            RuntimeError: Its failure was unexpected.
        """
        if self._errors:
            raise first_error(self._errors, len(self._image_ids))
        without_brackets = (self._lists[index][1:-1] for index in sorted(self._lists))
        return b"[%b]" % b",".join(filter(None, without_brackets))
