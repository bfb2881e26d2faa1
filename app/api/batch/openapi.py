"""The OpenAPI description of batches."""

from dataclasses import dataclass

from litestar.openapi.datastructures import ResponseSpec
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIType, RequestBody, Schema

from app.api.answering.schema import CocoResult
from app.api.batch.body import FIELDS, MAX_IMAGES
from app.api.batch.schema import BatchResponse
from app.api.documentation.openapi import PROBLEMS, ImageOperation
from app.api.parameters.tasks import BatchParameters

LINES = "application/x-ndjson"
"""The media type of a response in lines."""
RESPONSES = {
    200: ResponseSpec(BatchResponse | list[CocoResult], description="What became of each image", generate_examples=False),
    **PROBLEMS,
}


@dataclass
class BatchOperation(ImageOperation):
    """Describes a body with several images, and the response in lines."""

    kinds = (BatchParameters,)
    picture_types = ()

    def __post_init__(self) -> None:
        """Complete the operation that Litestar has made."""
        super().__post_init__()
        content = self.responses["200"].content  # type: ignore[index, union-attr]
        content[LINES] = OpenAPIMediaType(  # type: ignore[index]
            schema=Schema(
                type=OpenAPIType.STRING, description="A JSON object in each line: the images as they are done, then a summary"
            )
        )

    def describe_body(self, fields: dict[str, Schema]) -> RequestBody:
        """Describe the body with the images and these parameters."""
        file = Schema(type=OpenAPIType.STRING, content_media_type="application/octet-stream")
        encoded = Schema(
            type=OpenAPIType.STRING, content_encoding="base64", description="The image in base64, or its https address"
        )
        kinds = {"multipart/form-data": file, "application/json": encoded}
        return RequestBody(
            required=True,
            description=f"Up to {MAX_IMAGES} images: as form fields {', '.join(FIELDS)}, or in JSON.",
            content={
                kind: OpenAPIMediaType(
                    schema=Schema(
                        type=OpenAPIType.OBJECT,
                        properties={"images": _list_of(image), **fields},
                        required=["images"],
                    )
                )
                for kind, image in kinds.items()
            },
        )


def _list_of(image: Schema) -> Schema:
    return Schema(type=OpenAPIType.ARRAY, items=image, min_items=1, max_items=MAX_IMAGES, description="The images")
