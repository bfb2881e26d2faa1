"""Fetch the image of a request that names it by its address."""

from app.api.context import RequestContext
from app.remote.fetcher import Fetcher
from app.resilience.deadline import Deadline
from app.resilience.uploads import Upload
from app.telemetry.timing import FETCH


async def fetch_image(url: str, fetcher: Fetcher, upload: Upload, deadline: Deadline, context: RequestContext) -> bytes:
    """Fetch an image as a stage of a request, whose upload it counts to.

    The log gets its host; path and query may contain secrets.

    Raises:
        GatewayError: As `Fetcher.parse` and `Fetcher.fetch` say.
    """
    context.timing.begin(FETCH)
    address = fetcher.parse(url)
    context.log_fields["url_host"] = address.name
    image = await fetcher.fetch(address, upload.add, deadline)
    context.timing.lap(FETCH)
    return image
