"""The clients: each method sends one kind of request, repeats it if that may help, and returns what it found."""

import asyncio
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, Self, TypeVar, Unpack

import httpx

from nereid_client import calls
from nereid_client.answers import (
    Analysis,
    DeleteResult,
    EmbedBoxesResult,
    EmbedResult,
    FacesResult,
    IngestResult,
    OcrResult,
    PredictResult,
    SearchResult,
    Vector,
    VerifyResult,
)
from nereid_client.calls import Call
from nereid_client.errors import InvalidKey, NereidError, Problem, is_local
from nereid_client.parameters import (
    AnalyzeParameters,
    ClassifyParameters,
    DetectParameters,
    EmbedParameters,
    FaceParameters,
    IngestParameters,
    OcrParameters,
    SearchParameters,
    VerifyParameters,
)
from nereid_client.pictures import Image
from nereid_client.results import ClassifyResult, DetectResult
from nereid_client.retries import Attempts, Retries

T = TypeVar("T")
I = TypeVar("I", bound=Image)  # noqa: E741
Outcome = DetectResult | NereidError | OSError
"""What became of one of many images; OSError if it could not be read."""

URL = "http://127.0.0.1:4603"
TIMEOUT = httpx.Timeout(60, connect=5)
"""Longer than the gateway's own deadline, so that its response says what took too long."""


class Client:
    """Client of a gateway; use it as a context manager, or close it. Several threads may use one.

    Args:
        url: Address of the gateway.
        key: API key, `id.secret`.
        retries: When requests are repeated.
        options: Arguments of `httpx.Client`, such as `verify` for TLS, `timeout`, or `transport=httpx.HTTPTransport(uds=path)`.

    The key is checked: InvalidKey. All methods raise Problem for an error of the gateway, Unreachable without a response, and
    OSError for a file that cannot be read.
    """

    def __init__(self, url: str = URL, *, key: str | None = None, retries: Retries = Retries(), **options: Any) -> None:  # noqa: ANN401, B008
        self._http = httpx.Client(**_configured(url, key, options))
        self._retries = retries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def detect(self, image: Image, *, draw: bool = False, **parameters: Unpack[DetectParameters]) -> DetectResult:
        """Detect the objects in an image; with `draw`, the result also has a picture with their boxes."""
        return self._send(calls.detect(image, parameters, draw=draw))

    def classify(self, image: Image, **parameters: Unpack[ClassifyParameters]) -> ClassifyResult:
        """Classify an image."""
        return self._send(calls.classify(image, parameters))

    def ocr(self, image: Image, **parameters: Unpack[OcrParameters]) -> OcrResult:
        """Read the text in an image."""
        return self._send(calls.ocr(image, parameters))

    def detect_faces(self, image: Image, **parameters: Unpack[FaceParameters]) -> FacesResult:
        """Detect the faces in an image."""
        return self._send(calls.faces(image, parameters, describe=False))

    def recognize_faces(self, image: Image, **parameters: Unpack[FaceParameters]) -> FacesResult:
        """Detect the faces in an image, and describe each by a vector."""
        return self._send(calls.faces(image, parameters, describe=True))

    def verify_faces(self, image1: Image, image2: Image, **parameters: Unpack[VerifyParameters]) -> VerifyResult:
        """Tell whether the largest faces in two images are those of the same person."""
        return self._send(calls.verify((image1, image2), parameters))

    def embed(self, image: Image, **parameters: Unpack[EmbedParameters]) -> EmbedResult:
        """Describe an image by a vector."""
        return self._send(calls.embed(image, parameters))

    def embed_boxes(
        self, image: Image, boxes: Sequence[Sequence[float]], **parameters: Unpack[EmbedParameters]
    ) -> EmbedBoxesResult:
        """Describe parts of an image by vectors; each box is x1, y1, x2, y2, fractions of the upright image."""
        return self._send(calls.embed_boxes(image, boxes, parameters))

    def analyze(self, image: Image, **parameters: Unpack[AnalyzeParameters]) -> Analysis:
        """Find all at once in an image: objects, faces, text and vectors."""
        return self._send(calls.analyze(image, parameters))

    def embed_batch(self, images: Iterable[Image], **parameters: Unpack[EmbedParameters]) -> list[Vector | Problem]:
        """Describe images by vectors, up to 64 in one request; return a vector or a problem for each, in their order."""
        return [found for call in calls.embed_batches(images, parameters) for found in self._send(call)]

    def ingest(
        self, image: Image, *, metadata: Mapping[str, Any] | None = None, **parameters: Unpack[IngestParameters]
    ) -> IngestResult:
        """Add an image to the index, with all that is found in it; the same one twice is there once."""
        return self._send(calls.ingest(image, metadata, parameters))

    def search_image(self, image: Image, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Find the images in the index that are like this one."""
        return self._send(calls.search_image(image, parameters))

    def search_text(self, text: str, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Find the images in the index that have these words in them."""
        return self._send(calls.search_text(text, parameters))

    def search_faces(self, image: Image, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Find the faces in the index that are like the most certain one in this image."""
        return self._send(calls.search_faces(image, parameters))

    def delete_image(self, image_id: str) -> DeleteResult:
        """Delete an image from the index, with its objects, faces and text; nothing is counted if only a lost response told."""
        return self._send(calls.delete_image(image_id))

    def predict(self, name: str, image: Image, **parameters: Unpack[DetectParameters]) -> PredictResult:
        """Ask a model with objects, or a cascade, about an image."""
        return self._send(calls.predict(name, image, parameters))

    def detect_batch(self, images: Iterable[Image], **parameters: Unpack[DetectParameters]) -> list[DetectResult | Problem]:
        """Detect the objects in images, up to 64 in one request; return a result or a problem for each, in their order."""
        return [found for call in calls.batches(images, parameters) for found in self._send(call)]

    def detect_each(
        self, images: Iterable[I], *, in_flight: int = 4, draw: bool = False, **parameters: Unpack[DetectParameters]
    ) -> Iterator[tuple[I, Outcome]]:
        """Detect the objects in images, in requests of their own, several at a time; yield each image and its outcome, in order."""

        def one(image: I) -> tuple[I, Outcome]:
            try:
                return image, self.detect(image, draw=draw, **parameters)
            except (NereidError, OSError) as error:
                return image, error

        left = iter(images)
        with ThreadPoolExecutor(in_flight) as threads:
            running = deque(threads.submit(one, image) for image in islice(left, in_flight))
            while running:
                outcome = running.popleft().result()
                running.extend(threads.submit(one, image) for image in islice(left, 1))
                yield outcome

    def _send(self, call: Call[T]) -> T:
        attempts = Attempts(self._retries)
        while True:
            try:
                return call.read(self._http.request(call.method, call.path, **call.options))
            except (httpx.RequestError, Problem) as error:
                if call.if_gone is not None and attempts.may_have_deleted(error):
                    return call.if_gone
                time.sleep(attempts.pause_after(error))


class AsyncClient:
    """As `Client`, for asyncio; `options` are arguments of `httpx.AsyncClient`."""

    def __init__(self, url: str = URL, *, key: str | None = None, retries: Retries = Retries(), **options: Any) -> None:  # noqa: ANN401, B008
        self._http = httpx.AsyncClient(**_configured(url, key, options))
        self._retries = retries

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def detect(self, image: Image, *, draw: bool = False, **parameters: Unpack[DetectParameters]) -> DetectResult:
        """Detect the objects in an image; with `draw`, the result also has a picture with their boxes."""
        return await self._send(await asyncio.to_thread(calls.detect, image, parameters, draw=draw))

    async def classify(self, image: Image, **parameters: Unpack[ClassifyParameters]) -> ClassifyResult:
        """Classify an image."""
        return await self._send(await asyncio.to_thread(calls.classify, image, parameters))

    async def ocr(self, image: Image, **parameters: Unpack[OcrParameters]) -> OcrResult:
        """Read the text in an image."""
        return await self._send(await asyncio.to_thread(calls.ocr, image, parameters))

    async def detect_faces(self, image: Image, **parameters: Unpack[FaceParameters]) -> FacesResult:
        """Detect the faces in an image."""
        return await self._send(await asyncio.to_thread(calls.faces, image, parameters, describe=False))

    async def recognize_faces(self, image: Image, **parameters: Unpack[FaceParameters]) -> FacesResult:
        """Detect the faces in an image, and describe each by a vector."""
        return await self._send(await asyncio.to_thread(calls.faces, image, parameters, describe=True))

    async def verify_faces(self, image1: Image, image2: Image, **parameters: Unpack[VerifyParameters]) -> VerifyResult:
        """Tell whether the largest faces in two images are those of the same person."""
        return await self._send(await asyncio.to_thread(calls.verify, (image1, image2), parameters))

    async def embed(self, image: Image, **parameters: Unpack[EmbedParameters]) -> EmbedResult:
        """Describe an image by a vector."""
        return await self._send(await asyncio.to_thread(calls.embed, image, parameters))

    async def embed_boxes(
        self, image: Image, boxes: Sequence[Sequence[float]], **parameters: Unpack[EmbedParameters]
    ) -> EmbedBoxesResult:
        """Describe parts of an image by vectors; each box is x1, y1, x2, y2, fractions of the upright image."""
        return await self._send(await asyncio.to_thread(calls.embed_boxes, image, boxes, parameters))

    async def analyze(self, image: Image, **parameters: Unpack[AnalyzeParameters]) -> Analysis:
        """Find all at once in an image: objects, faces, text and vectors."""
        return await self._send(await asyncio.to_thread(calls.analyze, image, parameters))

    async def embed_batch(self, images: Iterable[Image], **parameters: Unpack[EmbedParameters]) -> list[Vector | Problem]:
        """Describe images by vectors, up to 64 in one request; return a vector or a problem for each, in their order."""
        return await self._send_each(calls.embed_batches(images, parameters))

    async def ingest(
        self, image: Image, *, metadata: Mapping[str, Any] | None = None, **parameters: Unpack[IngestParameters]
    ) -> IngestResult:
        """Add an image to the index, with all that is found in it; the same one twice is there once."""
        return await self._send(await asyncio.to_thread(calls.ingest, image, metadata, parameters))

    async def search_image(self, image: Image, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Find the images in the index that are like this one."""
        return await self._send(await asyncio.to_thread(calls.search_image, image, parameters))

    async def search_text(self, text: str, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Find the images in the index that have these words in them."""
        return await self._send(calls.search_text(text, parameters))

    async def search_faces(self, image: Image, **parameters: Unpack[SearchParameters]) -> SearchResult:
        """Find the faces in the index that are like the most certain one in this image."""
        return await self._send(await asyncio.to_thread(calls.search_faces, image, parameters))

    async def delete_image(self, image_id: str) -> DeleteResult:
        """Delete an image from the index, with its objects, faces and text; nothing is counted if only a lost response told."""
        return await self._send(calls.delete_image(image_id))

    async def predict(self, name: str, image: Image, **parameters: Unpack[DetectParameters]) -> PredictResult:
        """Ask a model with objects, or a cascade, about an image."""
        return await self._send(await asyncio.to_thread(calls.predict, name, image, parameters))

    async def detect_batch(self, images: Iterable[Image], **parameters: Unpack[DetectParameters]) -> list[DetectResult | Problem]:
        """Detect the objects in images, up to 64 in one request; return a result or a problem for each, in their order."""
        return await self._send_each(calls.batches(images, parameters))

    async def detect_each(
        self, images: Iterable[I], *, in_flight: int = 4, draw: bool = False, **parameters: Unpack[DetectParameters]
    ) -> AsyncGenerator[tuple[I, Outcome]]:
        """Detect the objects in images, in requests of their own, several at a time; yield each with its outcome when done."""

        async def one(image: I) -> tuple[I, Outcome]:
            try:
                return image, await self.detect(image, draw=draw, **parameters)
            except (NereidError, OSError) as error:
                return image, error

        left, running = iter(images), set[asyncio.Task[tuple[I, Outcome]]]()
        try:
            while True:
                running |= {asyncio.create_task(one(image)) for image in islice(left, in_flight - len(running))}
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _send_each(self, requests: Iterator[Call[list[T]]]) -> list[T]:
        found: list[T] = []
        while call := await asyncio.to_thread(next, requests, None):
            results = await self._send(call)
            found += results
        return found

    async def _send(self, call: Call[T]) -> T:
        attempts = Attempts(self._retries)
        while True:
            try:
                return call.read(await self._http.request(call.method, call.path, **call.options))
            except (httpx.RequestError, Problem) as error:
                if call.if_gone is not None and attempts.may_have_deleted(error):
                    return call.if_gone
                await asyncio.sleep(attempts.pause_after(error))


def _configured(url: str, key: str | None, options: dict[str, Any]) -> dict[str, Any]:
    if key and not re.fullmatch("[!-~]+", key):  # httpx's error would quote it
        raise InvalidKey("the API key has characters that no key has; does it end with a space or a line break?")
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {key}"} if key else {}), **options.get("headers", {})}
    has_no_proxy = is_local(httpx.URL(url)) and "proxy" not in options  # of the environment
    mounts = {"mounts": {"http://": None, "https://": None}} if has_no_proxy else {}
    return {"base_url": url, "timeout": TIMEOUT, **mounts, **options, "headers": headers}
