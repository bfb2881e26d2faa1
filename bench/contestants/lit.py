"""The detection of `plain` in LitServe, at POST /detect. The arguments are the port, and how many processes run the model."""

import sys
from typing import Annotated, Any

import litserve  # type: ignore[import-not-found]
from fastapi import Body  # type: ignore[import-not-found]


class Detector(litserve.LitAPI):  # type: ignore[misc]
    """What LitServe calls, the last two for each request."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - it is the CPU
        """Load the model in its own process."""
        from bench.contestants.plain import find  # noqa: PLC0415

        self.find = find

    def decode_request(self, request: Annotated[bytes, Body(media_type="image/jpeg")]) -> bytes:
        """Take the body as it is."""
        return request

    def predict(self, image: bytes) -> dict[str, Any]:
        """Respond with the objects in an encoded image."""
        return self.find(image)


if __name__ == "__main__":
    server = litserve.LitServer(Detector(api_path="/detect"), accelerator="cpu", workers_per_device=int(sys.argv[2]))
    server.run(host="127.0.0.1", port=int(sys.argv[1]), generate_client_file=False, log_level="warning")
