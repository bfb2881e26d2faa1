"""Networks that attack whoever loads or runs them, and damaged ones."""

from collections.abc import Callable, Iterator
from random import Random
from tempfile import NamedTemporaryFile

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from app.host.program import CommandError
from app.triton.repository import LOCK, REMOVED
from app.zoo.add import Request, add
from app.zoo.recognize import read_options
from app.zoo.repository import Repository

_HEAD = '<ir_version: 8, opset_import: ["": 17]> network (float[b, 3, 64, 64] images) => (float[b, 7, 84] output0)'


def _network(body: str) -> onnx.ModelProto:
    """Make a network that begins with `body`, in ONNX's text format, whose `value` it adds to its results."""
    return parser.parse_model(
        f"""{_HEAD} {{
        {body}
        mean = ReduceMean <axes = [1, 2, 3], keepdims = 0> (images)
        axes = Constant <value_ints = [1, 2]> ()
        column = Unsqueeze (mean, axes)
        shape = Constant <value_ints = [1, 7, 84]> ()
        wide = Expand (column, shape)
        single = ReduceSum <keepdims = 0> (value)
        output0 = Add (wide, single)
        }}"""
    )


def _endless(random: Random) -> onnx.ModelProto:
    """A loop of 2^62 rounds."""
    return _network(f"""
        trips = Constant <value_int = {random.randrange(1 << 40, 1 << 62)}> ()
        yes = Constant <value_int = 1> ()
        goes_on = Cast <to = 9> (yes)
        zero = Constant <value_floats = [0.0]> ()
        value = Loop (trips, goes_on, zero) <body = round (int64 i, bool c, float[1] x) => (bool d, float[1] y) {{
            d = Identity (c)
            y = Exp (x)
        }}>""")


def _expanding(random: Random) -> onnx.ModelProto:
    """A tensor of up to 2^62 elements."""
    side = random.choice([1 << 12, 1 << 17, 1 << 20, 1 << 31])
    made = random.choice(["Expand (zero, dims)", "Tile (cube, dims)", "ConstantOfShape (dims)", "Pad (cube, pads)"])
    return _network(f"""
        zero = Constant <value_floats = [0.0]> ()
        dims = Constant <value_ints = [{side}, {side}, 1]> ()
        ones = Constant <value_ints = [1, 1, 1]> ()
        pads = Constant <value_ints = [0, 0, 0, {side}, {side}, 0]> ()
        cube = Expand (zero, ones)
        value = {made}""")


def _limited(_: Random) -> onnx.ModelProto:
    """Runs for one and two images, but for no more."""
    return _network("""
        images_only = Shape <start = 0, end = 1> (images)
        one = Constant <value_ints = [1]> ()
        last = Sub (images_only, one)
        table = Constant <value_floats = [0.0, 0.0]> ()
        value = Gather (table, last)""")


def _claiming(random: Random) -> onnx.ModelProto:
    """A weight that claims to be huge, and has a few bytes."""
    network = _network("value = Identity (weight)")
    dims = random.choice([[1 << 62], [1 << 31, 1 << 31], [-1], [(1 << 62) + 1, 4], [1 << 40, 0]])
    network.graph.initializer.append(TensorProto(name="weight", data_type=1, dims=dims, raw_data=bytes(random.randrange(0, 64))))
    return network


def _nested(random: Random) -> bytes:
    """Graphs in graphs, up to beyond what protobuf reads."""
    graph = b""
    for _ in range(random.choice([10, 20, 40, 1000, 5000])):
        graph = _field(1, _field(4, b"If") + _field(5, _field(1, b"then_branch") + _field(6, graph)))
    whole: bytes = _network("value = Constant <value_floats = [0.0]> ()").SerializeToString()
    return whole + _field(7, graph)


def _field(number: int, content: bytes) -> bytes:
    """Encode a message in a field of protobuf."""
    length, size = len(content), b""
    while length > 127:
        size += bytes([length & 127 | 128])
        length >>= 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + content


def _outside(random: Random) -> onnx.ModelProto:
    """A weight in another file."""
    network = _network("value = Identity (weight)")
    weight = TensorProto(name="weight", data_type=1, dims=[4], data_location=TensorProto.EXTERNAL)
    place = random.choice(["/etc/passwd", "../../../../../../etc/passwd", "model.onnx", "/dev/zero", "", "/proc/self/environ"])
    weight.external_data.add(key="location", value=place)
    network.graph.initializer.append(weight)
    if random.random() < 0.5:  # in an attribute, beside a weight that is whole
        node = next(node for node in network.graph.node if node.op_type == "Constant")
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("value", weight))
        network.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.zeros(4, np.float32), "weight"))
    return network


def _foreign(random: Random) -> onnx.ModelProto:
    """An operator of nobody, or one that calls itself."""
    network = _network("value = Constant <value_floats = [0.0]> ()")
    own = helper.make_node("Own", ["single"], ["other"], domain="own")
    if random.random() < 0.5:
        inner = helper.make_node("Own", ["single"], ["other"], domain="own")
        function = helper.make_function("own", "Own", ["single"], ["other"], [inner], [helper.make_opsetid("own", 1)])
        network.functions.append(function)
    network.opset_import.append(helper.make_opsetid("own", 1))
    network.graph.node.insert(len(network.graph.node) - 1, own)
    network.graph.node[-1].input[1] = "other"
    return network


def _metadata(random: Random) -> onnx.ModelProto:
    """Texts about itself that are deep, long or odd."""
    network = _network("value = Constant <value_floats = [0.0]> ()")
    depth = random.randrange(10, 100_000)
    texts = ["[" * depth + "]" * depth, "{0:" * depth, "-" * depth + "1", "9" * depth, "{0: 'a\x1b[2J\u202e\n" + "x" * depth + "'}"]
    helper.set_model_props(network, {random.choice(["names", "imgsz", "task", "stride", "args"]): random.choice(texts)})
    return network


Kind = Callable[[Random], onnx.ModelProto | bytes]
_KINDS: list[Kind] = [_endless, _expanding, _claiming, _limited, _nested, _outside, _foreign, _metadata]


def hostile(count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield hostile networks with the names of their kinds."""
    random = Random(seed)  # noqa: S311 - not a secret
    for number in range(count):
        kind = _KINDS[number % len(_KINDS)]
        network = kind(random)
        yield kind.__name__.strip("_"), network if isinstance(network, bytes) else network.SerializeToString()


def mutated(network: bytes, count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield copies of a network in which bytes are changed, cut out or repeated."""
    random = Random(seed)  # noqa: S311 - not a secret
    for _ in range(count):
        content = bytearray(network)
        for _ in range(random.choice([1, 1, 2, 8])):
            at, length = random.randrange(len(content)), random.choice([1, 4, 64])
            part = content[at : at + length]
            damages = [random.randbytes(len(part)), b"", part * 2, b"\xff" * len(part), bytes(len(part))]
            content[at : at + length] = random.choice(damages)
        yield bytes(content)


def add_hostile(content: bytes, repository: Repository, apply: Callable[[str], str] = lambda _: "") -> str:
    """Add a network and remove it again; return why that was not possible, or nothing. Nothing else must be left."""
    with NamedTemporaryFile(suffix=".onnx") as file:
        file.write(content)
        file.flush()
        options = read_options({"labels": "a,b,c", "box_units": "normalized"})
        try:
            add(Request(file.name, "doors", "", None, options, is_untrusted=True), repository, apply)
        except CommandError as error:
            reason = str(error)
            assert "\n" not in reason
        else:
            reason = ""
            with repository.writing():
                repository.remove("doors")
            apply("doors")
    assert [path.name for path in repository.path.iterdir() if path.name not in {LOCK, REMOVED}] == []
    return reason
