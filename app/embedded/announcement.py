"""Tell the user where the API listens, and when it is ready: it also listens while no Triton can run the default model."""

from app.settings.schema import Settings
from app.telemetry.logging import say


class Announcement:
    """Prints that the API is ready; before that, if it is not, that it listens."""

    def __init__(self, settings: Settings, stops: str) -> None:
        self.is_ready: bool | None = None
        """The last state that was told; None before the first."""
        sockets = [str(socket) for socket in settings.sockets if socket is not None]
        where, url = ", ".join(sockets), settings.local_url
        offer = f"search at {url}" if settings.search == "alone" else f"POST {url}/detect"
        count = f"{len(sockets)} instance{'s' if len(sockets) > 1 else ''} at"
        self._ready = f"ready: {count} {where}" if sockets else f"ready: {offer}, documentation at {url}/docs"
        self._not_ready = (
            f"listening at {where or url}, but no Triton at {', '.join(settings.triton_addresses)} can run {settings.model} yet: "
            "detection fails until one can, and then 'ready' is printed; `nereid doctor` says what is wrong"
        )
        self._stops = f"Ctrl-C stops {stops}"

    def update(self, *, is_ready: bool) -> None:
        """Print whether the API is ready if that was not printed before; once it is ready, nothing more is printed."""
        if self.is_ready or self.is_ready == is_ready:
            return
        self.is_ready = is_ready
        say(f"{self._ready if is_ready else self._not_ready}; {self._stops}")
