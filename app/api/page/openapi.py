"""What the OpenAPI document says of `/`."""

from dataclasses import dataclass

from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, Operation, Schema

HTML = "text/html"
"""The media type of the page."""


@dataclass
class PageOperation(Operation):
    """Adds the page to the operation that describes the service."""

    def __post_init__(self) -> None:
        """Complete the operation that Litestar has made."""
        content = self.responses["200"].content  # type: ignore[index, union-attr]
        content[HTML] = OpenAPIMediaType(  # type: ignore[index]
            schema=Schema(type=OpenAPIType.STRING, description="A page to try the service, unless it is off")
        )
