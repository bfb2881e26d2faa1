"""The settings: types, limits and defaults, and what follows from them."""

import math
import os
from hashlib import sha256
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

PREFIX = "NEREID_"
"""The prefix of environment variables: `NEREID_PORT=8080` sets `port`."""
MIN_AGE_SECONDS = 60
"""Granian's minimum age for renewing a worker."""
TRITON_SOCKET = "triton:1"
"""File name of the embedded Triton's socket: Triton adds the number of a port to the name it is given."""
DIALECTS = ("deepstack", "roboflow", "ultralytics", "nim", "kserve")
"""Interfaces of other detection services. Each is a module or package of `app.api.dialects` and the prefix of its own paths."""

Port = Annotated[int, Meta(ge=1, le=65535)]

SIZES = ("max_megapixels", "max_megapixels_non_jpeg", "max_file_size_mb", "max_batch_size_mb")
"""The settings with the maximum sizes of images and bodies."""


Kind = TypeVar("Kind", bound=msgspec.Struct)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings but those of features, which a subclass has, and what follows from them.

    The reference is generated from the docstrings of the fields.
    """

    host: Annotated[str, Meta(pattern=r"^[^\[\]]+$", title="an address or a name, such as :: or 127.0.0.1, without brackets")] = (
        "127.0.0.1"
    )
    """Address the API listens on. `0.0.0.0`: all IPv4 addresses; `::`: all of IPv6, too."""
    port: Port = 4603
    """Port the API listens on."""
    socket: Annotated[str, Meta(max_length=100)] = ""
    """Unix socket the API listens on, instead of host and port; with instances, the folder of their sockets. Empty: none; with
    instances, `run`."""
    socket_mode: Annotated[str, Meta(pattern="^[0-7]{3}$", title="three digits from 0 to 7, such as 660")] = "660"
    """Permissions of the unix sockets, octal; the proxy must be allowed to write."""
    instances: Annotated[int, Meta(ge=0, le=64)] = 0
    """Instances of the API that `serve` runs, each on a unix socket `nereid-N.sock`, for a proxy in front of them. 0: one, on
    `socket`, or on host and port."""
    trusted_proxies: str = ""
    """Addresses and networks of proxies, separated by commas, that name the client's address: in `X-Real-IP`, or as the last
    address in `X-Forwarded-For` or `Forwarded` that is not one of them. They must remove those of the three that they do not
    write. On a unix socket, any is trusted. Empty: none."""
    api_keys_file: str = ""
    """TOML file of the API keys, read again when it changes. Empty: no key is needed."""
    workers: Annotated[int, Meta(ge=0, le=256)] = 0
    """API processes per instance. 0: one per core, within the CPU quota of the container; fewer if a quarter of the memory is too
    little for them, at 140 MiB each."""
    worker_max_age_seconds: Annotated[int, Meta(ge=0, le=10**8)] = 0
    """Age at which an API process is replaced, at least 60 seconds; up to a tenth more or less. 0: never."""
    worker_max_memory_mb: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Resident memory at which an API process is replaced, MiB. 0: never."""
    keep_alive_seconds: Annotated[int, Meta(ge=1, le=3600)] = 65
    """Time after which an idle connection is closed, seconds: longer than a proxy keeps it, often 60 seconds. A header may take as
    long, but the first one on a port 10 to 15 seconds."""
    drain_delay_seconds: Annotated[float, Meta(ge=0, le=600)] = 1.0
    """After SIGTERM, time for which `/readyz` answers 503 before new connections are refused, seconds."""
    decode_threads: Annotated[int, Meta(ge=1, le=256)] = 2
    """Threads per worker that decode images, request bodies and raw model outputs; as many more take images of a megapixel, bodies
    of a megabyte, AVIF, HEIC and TIFF."""

    model: str = "yolo11n"
    """Model used when a request names none."""
    task_models: str = ""
    """Default models of tasks, instead of `yolo11n-seg`, `yolo11n-pose`, `yolo11n-obb`, `efficientnet_lite0`, `ocr_detection`,
    `ocr_recognition` and `embedding`: `segmentation=parts,classification=mine`."""
    shapes: Literal["rectangles", "square"] = "rectangles"
    """Input of the models whose config lists `shapes`: the smallest of these that holds the image, or always the square. `GET
    /models/NAME` tells those in use."""
    faces: bool = False
    """Whether `/faces/detect`, `/faces/recognize`, `/faces/verify` and the faces of `/analyze` are on. Vectors that tell whose a
    face is are biometric data, whose processing the law restricts in many places (in the EU: GDPR, article 9; AI Act)."""
    model_repository: str = "model_repository"
    """Triton's model repository. By default, it is in the current folder if that contains a `model_repository`, as a checkout does;
    otherwise in `~/.local/share/nereid`, or in `nereid` in `XDG_DATA_HOME`. `nereid detect` does not use the current folder, unless
    that is a checkout: it runs what is in these folders."""
    triton_endpoints: str = ""
    """gRPC endpoints of running Tritons, separated by commas: `host:port`, `unix:/path`, or `dns:///name:port` for one Triton at
    each address that the name has, now and later. Empty: use the embedded Triton."""
    triton_loads_models: bool = False
    """Whether these Tritons run with `--model-control-mode=explicit` and read the same model repository: then they load the models
    that are added to it."""
    triton_tls_folder: str = ""
    """Folder with PEM files for TLS to these Tritons, whose certificates must name the host in their address: `ca.crt`, the CAs; if
    Triton requires a certificate of the gateway, `tls.crt` and `tls.key`, not encrypted. Empty: no TLS."""
    triton_ports: Annotated[int, Meta(ge=0, le=65534)] = 0
    """TCP port on 127.0.0.1 at which the embedded Triton also answers HTTP, with its metrics at the next one. Then every user of
    this machine can run models and read statistics; the control of models stays off. 0: neither; Triton answers only its own user,
    through a unix socket."""
    triton_metrics_url: Annotated[
        str,
        Meta(
            pattern="^(https?://[^,]+(,https?://[^,]+)*)?$",
            title="URLs such as http://triton.example.org:8002/metrics, separated by commas",
        ),
    ] = ""
    """Metrics endpoints of running Tritons, `http://host:8002/metrics`, separated by commas, for the GPUs in `/health`. Empty:
    none."""
    triton_control_key_file: str = ""
    """File with the key of a running Triton that restricts protocols:
    `--grpc-restricted-protocol=shared-memory,model-repository:nereid=KEY`. Empty: none is needed."""
    triton_home: str = ".triton"
    """Folder of the embedded Triton's installation and log; each runs one Triton at a time. By default, it is in the same folder as
    the default model repository."""
    gpu: Literal["auto", "on", "off"] = "auto"
    """Whether the embedded Triton runs its models on the GPU of this machine, by CUDA and in FP16. If there is one, `on` downloads
    CUDA's libraries, 1.6 GB, and `auto` uses them if they are there, or asks on a terminal."""
    transport: Literal["auto", "shm", "inline"] = "auto"
    """How tensors reach Triton: `shm` (shared memory), `inline` (in the request) or `auto` (`shm` if available)."""
    calls_in_flight: Annotated[int, Meta(ge=0, le=4096)] = 0
    """Maximum number of calls in progress to each Triton for one model, on the whole host, divided among the workers and rounded
    up; images that become ready meanwhile are sent together. 0: one more than the model has instances, or twice that for a model
    without batches."""
    timeout_seconds: Annotated[float, Meta(gt=0, le=600)] = 5.0
    """Deadline of a request in seconds, from the end of its body to its response; a twentieth more for each further image of a
    batch."""
    max_timeout_seconds: Annotated[float, Meta(gt=0, le=600)] = 20.0
    """Maximum deadline of a batch, or that a request may set with `timeout_ms`, seconds."""
    body_seconds: Annotated[float, Meta(gt=0, le=3600)] = 30.0
    """Maximum time to receive a request body, or to send a picture, seconds; of which at most 10 pass between two reads or
    writes."""
    max_requests: Annotated[int, Meta(ge=0, le=65536)] = 0
    """Maximum number of requests in progress per model, on the whole host; below it the gateway finds the number that can be
    answered in time. 0: 128, or two full batches per instance of the model if that is more."""
    max_uploads: Annotated[int, Meta(ge=1, le=65536)] = 2048
    """Maximum number of request bodies being received, on the whole host."""
    memory_mb: Annotated[int, Meta(ge=0, le=1 << 20)] = 0
    """Memory for the images of all requests on the host, MiB, and as much again for request bodies being received; at least what
    the largest ones need. 0: an eighth of the memory of the host or container, each."""
    max_file_size_mb: Annotated[float, Meta(gt=0, le=1024)] = 50.0
    """Maximum size of a request body, MiB."""
    max_batch_size_mb: Annotated[float, Meta(gt=0, le=16384)] = 128.0
    """Maximum size of the body of a request with several images, MiB."""
    url_hosts: str = ""
    """Hosts from which images may be fetched by https, separated by commas: `images.example.org`, `*.example.org` for all
    subdomains, or `*` for any host; with `:port` if it is not 443. Only public IP addresses are allowed. Empty: none."""
    max_megapixels: Annotated[float, Meta(gt=0, le=178)] = 52.0
    """Maximum size of an image in millions of pixels, checked in its header. This, and the sizes of files, are lower where
    the memory is too little for the largest image, without what Triton takes."""
    max_megapixels_non_jpeg: Annotated[float, Meta(gt=0, le=178)] = 25.0
    """The same for images that cannot be decoded at a reduced size (all formats except JPEG), if it is lower; twice as many
    (50) for the HEICs of phones (8 bits, 4:2:0), and half as many (12.5) for AVIF, because a pixel takes less or more memory."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log messages, which are text on a terminal and lines of JSON elsewhere."""
    slow_request_ms: Annotated[float, Meta(ge=0, le=10_000_000)] | None = None
    """Requests for a model that take longer are logged as warnings, milliseconds. 0: never. Default: 100; with the embedded Triton,
    whose models run on the CPU, 1000."""
    page: bool = True
    """Whether `/` serves a page to try detection in a browser."""
    cors_origins: str = ""
    """Origins whose pages may call the API from a browser, separated by commas: `https://app.example.org`, `http://localhost:3000`.
    `*`: the pages of every origin. They cannot change models. Empty: none."""
    routes_file: str = ""
    """TOML file of the routes: names that stand for models, with canaries, shadows and fallbacks. It is read again when it changes,
    and written by `PUT /routes/{name}`. Empty: no routes."""
    loaded_models: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Maximum number of models that Triton keeps loaded: others are loaded at their first request, and the least recently used ones
    leave, never a default model. 0: all models are loaded."""
    dialects: str = ",".join(name for name in DIALECTS if name != "kserve")
    """Interfaces of other detection services to offer, separated by commas; `kserve` is another. `none`: none."""
    frigate_zmq: Annotated[str, Meta(pattern=r"^((tcp|ipc)://.+)?$", title="an address such as tcp://127.0.0.1:5555")] = ""
    """Address at which Frigate's ZMQ detector is answered, `tcp://127.0.0.1:5555` or `ipc:///path`; only loopback and private IP
    addresses. Empty: none."""
    search: Literal["off", "on", "alone"] = "off"
    """Search in images that were sent before, on PostgreSQL: `on`, by a process beside the workers, as `serve --search` does;
    `alone`, by workers that do nothing else, as `nereid search` does."""
    database_url: Annotated[str, Meta(pattern="^(postgres(ql)?://.+)?$", title="a URL such as postgresql://nereid@db/nereid")] = ""
    """URL of the PostgreSQL of search, 16 or later with pgvector 0.8.4 or later. Empty: the embedded one, which `serve` and
    `search` run."""
    database_home: str = ".postgres"
    """Folder of the embedded PostgreSQL's installation, data and log. By default, it is in the same folder as the default model
    repository. If root runs this, another user runs PostgreSQL, who must be able to enter the folders above it."""
    search_folders: str = ""
    """Folders from which images may be indexed by their path, separated by commas; those below them, too. Empty: none."""
    search_exclude: str = "@eaDir/,.*/,._*"
    """Names of files, and, with a slash at the end, of folders that are left out when a folder is indexed: patterns such as
    `*_thumb.jpg`, separated by commas."""
    search_thumbnails: bool = False
    """Whether search keeps a small picture of each image and each face that it indexes."""
    tracing: bool = False
    """Export OpenTelemetry traces, configured by the variables `OTEL_*`; needs the extra `otel`."""

    def of(self, kind: type[Kind]) -> Kind:
        """Return the settings of a feature, by their kind; the defaults if these settings are without features."""
        return kind(**{field.name: getattr(self, field.name, field.default) for field in msgspec.structs.fields(kind)})

    @property
    def sockets(self) -> list[Path | None]:
        """The socket of each instance; None for host and port."""
        if not self.instances:
            return [Path(self.socket).resolve() if self.socket else None]
        folder = self.socket_folder.resolve()
        return [folder / f"nereid-{number}.sock" for number in range(1, self.instances + 1)]

    @property
    def socket_folder(self) -> Path:
        """The folder of the instances' sockets."""
        return Path(self.socket or "run")

    @property
    def address(self) -> str:
        """Host and port, as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def local_url(self) -> str:
        """The URL of the API on this machine if it listens on host and port."""
        is_everywhere = self.host in {"0.0.0.0", "::"}  # noqa: S104 - compared only
        return f"http://127.0.0.1:{self.port}" if is_everywhere else f"http://{self.address}"

    @property
    def trusted_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """The networks of trusted proxies; raises ValueError if a name is neither an address nor a network."""
        named = filter(None, map(str.strip, self.trusted_proxies.split(",")))
        return tuple(ip_network(name) for name in named)

    @property
    def triton_folder(self) -> Path:
        """The folder of the embedded Triton's socket; each `triton_home` has one."""
        # /dev/shm is the same for all programs, unlike the temporary folder and `XDG_RUNTIME_DIR`, and a socket's path has at most
        # 107 bytes.
        home = os.fsencode(Path(self.triton_home).resolve())
        return Path("/dev/shm", f"nereid-triton-{sha256(home).hexdigest()[:12]}")  # noqa: S108 - its users check its owner

    @property
    def database_folder(self) -> Path:
        """The folder of the embedded PostgreSQL's socket, as `triton_folder`."""
        home = os.fsencode(Path(self.database_home).resolve())
        return Path("/dev/shm", f"nereid-postgres-{sha256(home).hexdigest()[:12]}")  # noqa: S108 - its users check its owner

    @property
    def search_database(self) -> str:
        """The URL of the database of search: that in the settings, or of the embedded one."""
        return self.database_url or f"postgresql://nereid@/nereid?host={self.database_folder}&port=5432"

    @property
    def search_folder_paths(self) -> tuple[Path, ...]:
        """The folders from which images may be indexed by their path."""
        return tuple(Path(each.strip()).resolve() for each in self.search_folders.split(",") if each.strip())

    @property
    def search_excluded(self) -> tuple[str, ...]:
        """The patterns of names that are left out when a folder is indexed."""
        return tuple(filter(None, map(str.strip, self.search_exclude.split(","))))

    @property
    def triton_addresses(self) -> tuple[str, ...]:
        """Endpoints (gRPC) of the Tritons in use, embedded or external: `host:port`, `unix:/path` or `dns:///name:port`."""
        named = tuple(filter(None, map(str.strip, self.triton_endpoints.split(","))))
        return named or (f"unix:{self.triton_folder / TRITON_SOCKET}",)

    @property
    def triton_address(self) -> str:
        """The gRPC endpoint of the first Triton, such as the embedded one."""
        return self.triton_addresses[0]

    @property
    def metrics_urls(self) -> tuple[str, ...]:
        """Metrics endpoints of the Tritons, as far as they are known."""
        return tuple(filter(None, self.triton_metrics_url.split(",")))

    @property
    def control_key_path(self) -> Path | None:
        """The file with the key of Triton's restricted protocols; None if they are not restricted."""
        return Path(self.triton_control_key_file) if self.triton_control_key_file else None

    @property
    def max_body_bytes(self) -> int:
        """Maximum size of a request body, in bytes."""
        return int(self.max_file_size_mb * 2**20)

    @property
    def max_batch_bytes(self) -> int:
        """Maximum size of the body of a request with several images, in bytes."""
        return int(self.max_batch_size_mb * 2**20)

    def shrunk(self, fraction: float) -> "Settings":
        """Return these settings with a fraction of the sizes of images and bodies."""
        return (
            msgspec.structs.replace(self, **{name: round(fraction * getattr(self, name), 2) for name in SIZES})
            if fraction < 1
            else self
        )

    @property
    def max_pixels(self) -> int:
        """Maximum size of an image, in pixels."""
        return int(self.max_megapixels * 1e6)

    @property
    def max_pixels_non_jpeg(self) -> int:
        """Maximum size of an image that cannot be decoded at a reduced size, in pixels."""
        return min(self.max_pixels, int(self.max_megapixels_non_jpeg * 1e6))

    @property
    def dialect_names(self) -> list[str]:
        """The enabled dialects, each once."""
        return [] if self.dialects == "none" else list(dict.fromkeys(filter(None, map(str.strip, self.dialects.split(",")))))

    @property
    def url_host_patterns(self) -> tuple[str, ...]:
        """Patterns of the hosts from which images may be fetched, in lower case."""
        return tuple(filter(None, map(str.strip, self.url_hosts.lower().split(","))))

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        """Origins whose pages may call the API, in lower case as browsers send them."""
        return tuple(filter(None, map(str.strip, self.cors_origins.lower().split(","))))

    @property
    def drain_seconds(self) -> int:
        """Maximum time for requests in progress to end: the limits of bodies and deadlines, plus a margin."""
        return math.ceil(self.body_seconds + max(self.timeout_seconds, self.max_timeout_seconds)) + 5


class SettingsError(Exception):
    """The environment does not contain valid settings; the message names the variable."""
