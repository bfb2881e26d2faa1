"""Adding a network of one's own makes a checked model that the gateway understands, or changes nothing."""

import hashlib
import re
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
import trustme

from app.host import program
from app.host.program import CommandError
from app.model.golden import picture
from app.model.heads import ClassificationHead, DetectionHead, PoseHead
from app.model.spec import are_interchangeable, from_triton_config
from app.pipeline.golden import parse, read_golden
from app.triton.config_file import read_config_file
from app.triton.repository import LOCK, REMOVED, config_path, loadable_models
from app.zoo import check, description
from app.zoo.add import Request, add, read_options
from app.zoo.inference import open_session, run
from app.zoo.repository import Repository
from tests.fakes.http import answering
from tests.zoo.exported import FEATURES, exported, feature_tensors, head_tensors

SIZE = (256, 128)
NAMES = {0: "door", 1: "window", 2: "gate"}
UNITS = {"yolo": SIZE, "yolov5": SIZE, "end_to_end": SIZE}


def network(head: str = "yolo", **options: Any) -> onnx.ModelProto:  # noqa: ANN401
    return exported(head_tensors(head, UNITS.get(head, (1, 1))), SIZE, **{"names": NAMES, **options})


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repository")


def save(model: onnx.ModelProto, path: Path) -> Path:
    path.write_bytes(model.SerializeToString())
    return path


def added(source: Path | str, repository: Repository, name: str | None = "doors", licence: str = "MIT", **options: str) -> str:
    return add(Request(str(source), name, licence, check.SAMPLES, read_options(options)), repository, lambda _: "")[0]


def content(repository: Repository) -> dict[str, bytes]:
    files = [path for path in repository.path.rglob("*") if path.is_file() and path.name not in {LOCK, REMOVED}]
    return {str(path.relative_to(repository.path)): path.read_bytes() for path in files}


@contextmanager
def refused(repository: Repository, message: str) -> Iterator[None]:
    before = content(repository)
    with pytest.raises(CommandError) as caught:
        yield
    assert re.search(message, str(caught.value))
    assert "\n" not in str(caught.value)
    assert content(repository) == before


@pytest.mark.parametrize(
    ("head", "options", "max_iou"),
    [
        ("yolo", {}, 0.7),
        ("yolo", {"iou": "0.45"}, 0.45),
        ("yolov5", {}, 0.7),
        ("yolox", {"head": "yolox"}, 0.7),
        ("end_to_end", {"head": "end_to_end"}, 1),
        ("rtdetr", {"head": "rtdetr"}, 1),
        ("rtdetr_topk", {"head": "rtdetr_topk"}, 1),
        ("rfdetr", {}, 1),
        ("dfine", {}, 1),
    ],
)
def test_detector_of_each_head_is_served(
    repository: Repository, tmp_path: Path, head: str, options: dict[str, str], max_iou: float
) -> None:
    added(save(network(head), tmp_path / "best.onnx"), repository, **options)
    folder = repository.path / "doors"
    embedded, spec = (from_triton_config(read_config_file(config_path(folder, is_embedded=one)), "1") for one in (True, False))

    assert loadable_models(repository.path) == ["doors"]
    assert spec.input_is_canvas
    assert (spec.input_size, spec.labels, spec.default_version) == (SIZE, tuple(NAMES.values()), 1)
    assert (spec.licence, spec.device, embedded.device) == ("MIT", "gpu", "cpu")
    assert are_interchangeable(spec, embedded)
    assert spec.expect_head(DetectionHead).max_iou == max_iou
    session = onnxruntime.InferenceSession(folder / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    (count, *_) = session.run(["num_dets"], {"image": np.zeros((2, 128, 256, 3), np.uint8)})
    assert count.min() > 0


@pytest.mark.parametrize("head", ["yolo", "yolox", "end_to_end", "rfdetr", "dfine"])
def test_golden_picture_tells_zeros_from_nothing(repository: Repository, tmp_path: Path, head: str) -> None:
    """Both configs have what the model finds in it, whether that is anything or not; requests do not ask for raw values."""
    tensors = head_tensors(head, UNITS.get(head, (1, 1)))
    empty = {name: tensor * 0 - 9 * (name == "labels") if head == "rfdetr" else tensor * 0.01 for name, tensor in tensors.items()}
    added(save(exported(tensors, SIZE, names=NAMES), tmp_path / "best.onnx"), repository, "doors", head=head)
    added(save(exported(empty, SIZE, names=NAMES), tmp_path / "empty.onnx"), repository, "empty", head=head)
    for name in ("doors", "empty"):
        folder = repository.path / name
        for is_embedded in (True, False):
            spec = from_triton_config(read_config_file(config_path(folder, is_embedded=is_embedded)), "1")
            values = parse(spec.golden)["1"]
            assert bool(values.boxes) == (name == "doors")
            assert spec.gives_sample
            assert "golden_sample" not in spec.requested_names
            outputs = run(open_session(folder / "1" / "model.onnx"), {"image": picture(*SIZE)[None]})
            assert values.difference(read_golden(spec, outputs)) == ""
            assert values.difference(read_golden(spec, {key: 0 * tensor for key, tensor in outputs.items()}))


def test_versions_of_earlier_programs_have_no_raw_values(repository: Repository, tmp_path: Path) -> None:
    """All versions share a config, and Triton would not load one that lacks an output; when it is removed, the others have it."""
    added(save(network(), tmp_path / "best.onnx"), repository)
    old = repository.load("doors")
    assert old is not None
    with repository.writing():
        repository.write("doors", msgspec.structs.replace(old, golden={}))
    config = repository.path / "doors" / "config.pbtxt"
    assert "golden" not in config.read_text(encoding="utf-8")
    added(save(network(half=True), tmp_path / "best.onnx"), repository)
    spec = from_triton_config(read_config_file(config), "2")
    assert (list(parse(spec.golden)), spec.gives_sample) == (["2"], False)
    with repository.writing():
        repository.remove("doors:1")

    assert from_triton_config(read_config_file(config), "2").gives_sample


def test_detector_for_ap_finds_several_classes_in_a_place(repository: Repository, tmp_path: Path) -> None:
    source = save(network(), tmp_path / "best.onnx")
    added(source, repository)
    added(source, repository, "doors_ap", floor="0.001", multi_label="true")
    sessions = (open_session(repository.path / name / "1" / "model.onnx") for name in ("doors", "doors_ap"))
    found = [check.detections(run(session, {"image": np.zeros((1, 128, 256, 3), np.uint8)})) for session in sessions]
    plain, every = (len(one.boxes) - len(np.unique(one.boxes, axis=0)) for one in found)

    assert plain == 0 < every
    with refused(repository, "multi_label is for the heads yolo, yolov5, yolox"):
        added(save(network("rtdetr"), tmp_path / "other.onnx"), repository, "other", head="rtdetr", multi_label="true")


def test_classifier_is_served(repository: Repository, tmp_path: Path) -> None:
    logits = exported({"logits": np.array([1.0, 3.0, 2.0])}, SIZE, names=NAMES)
    added(save(logits, tmp_path / "best.onnx"), repository)
    spec = from_triton_config(read_config_file(repository.path / "doors" / "config.pbtxt"), "1")

    assert spec.expect_head(ClassificationHead).scores == "probabilities"
    assert (spec.resize, spec.crop) == ("center_crop", 0.875)


@pytest.mark.parametrize("head", ["yolo", "end_to_end"])
@pytest.mark.parametrize("task", list(FEATURES))
def test_network_with_features_is_served(
    repository: Repository, tmp_path: Path, task: str, head: str, capsys: pytest.CaptureFixture[str]
) -> None:
    added(save(exported(feature_tensors(task, head), SIZE, names=NAMES, **FEATURES[task]), tmp_path / "best.onnx"), repository)
    folder = repository.path / "doors"
    spec, embedded = (from_triton_config(read_config_file(config_path(folder, is_embedded=one)), "1") for one in (False, True))
    found = run(open_session(folder / "1" / "model.onnx"), {"image": np.zeros((2, 128, 256, 3), np.uint8)})
    config = read_config_file(folder / "config.pbtxt")

    assert f"doors:1: {task}, 3 classes" in capsys.readouterr().err
    assert spec.head.task == task
    assert are_interchangeable(spec, embedded)
    assert spec.max_batch == (64 if task == "pose" else 8)
    assert not isinstance(spec.head, PoseHead) or spec.head.keypoint_names == ("nose", "tail")
    assert {tensor["name"]: [2, *map(int, tensor["dims"])] for tensor in config["output"]} == {
        name: list(tensor.shape) for name, tensor in found.items()
    }


@pytest.mark.parametrize(("batch", "largest"), [("8", (2, 8)), ("True", (1, 1)), ("-5", (1, 1)), ("0.5", (2, 64))])
def test_model_gets_no_larger_batch_than_the_nms_inside_the_network(
    repository: Repository, tmp_path: Path, batch: str, largest: tuple[int, int]
) -> None:
    inside = network("end_to_end", args={"nms": True})
    inside.metadata_props.add(key="batch", value=batch)
    added(save(inside, tmp_path / "best.onnx"), repository, head="end_to_end")
    found = repository.load("doors")

    assert found is not None
    assert (found.embedded.max_batch, found.production.max_batch) == largest


def test_name_and_labels_are_found_beside_the_file(repository: Repository, tmp_path: Path) -> None:
    source = save(network(names=""), tmp_path / "my best (2).onnx")
    (tmp_path / "labels.txt").write_text("a\nb, c\n\nd\n", encoding="utf-8")
    assert added(tmp_path, repository, None) == tmp_path.name
    assert added(source, repository, None) == "my_best_2_"
    found = description.load(repository.path / "my_best_2_")
    assert found is not None
    assert found.labels == ("a", "b, c", "d")


def test_same_name_makes_the_next_version(repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    added(save(network(), tmp_path / "first.onnx"), repository)
    heads = head_tensors("yolo", SIZE)
    heads["output0"][:, :100] = 0  # finds less
    second = save(exported(heads, SIZE, names=NAMES), tmp_path / "second.onnx")
    added(second, repository, licence="")

    found = repository.load("doors")
    assert found is not None
    assert (list(found.versions), found.default_version, found.licence, found.source) == (["1", "2"], 2, "MIT", "second.onnx")
    assert re.search(r"doors:2 and doors:1 agree in \d+ of \d+ boxes", capsys.readouterr().err)
    with refused(repository, r"doors:2 is this very file; .*nereid use doors:2"):
        added(second, repository)
    with refused(repository, "other classes than doors"):
        added(save(network(names={**NAMES, 1: "roof"}), tmp_path / "other.onnx"), repository)
    with refused(repository, "another resize than doors"):
        added(save(network(version=3), tmp_path / "stretched.onnx"), repository, resize="stretch")
    with refused(repository, "another task than doors"):
        added(save(exported({"logits": (3,)}, SIZE, names=NAMES), tmp_path / "classifier.onnx"), repository)


def test_versions_are_chosen_and_removed(repository: Repository, tmp_path: Path) -> None:
    for index in range(3):
        added(save(network(version=index), tmp_path / f"{index}.onnx"), repository)
    folder = repository.path / "doors"
    with repository.writing():
        repository.use("doors:1")
        assert 'key: "default_version" value { string_value: "1" }' in (folder / "config.pbtxt").read_text(encoding="utf-8")
        repository.remove("doors:2")
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["1", "3", "configs"]
    with repository.writing():
        repository.remove("doors:3")
    added(save(network(version=4), tmp_path / "4.onnx"), repository)  # the number of a removed version is not given again
    with repository.writing():
        repository.use("doors:1")
    for reference, message in (
        ("doors:1", "doors:1 is the default version; first: nereid use doors:4"),
        ("doors:2", "doors has no version 2; it has 1, 4"),
        ("windows", "there is no model windows in .*; it has doors"),
        ("../doors", r"'\.\./doors' is not a name"),
    ):
        with refused(repository, message), repository.writing():
            repository.remove(reference)
    with repository.writing():
        repository.remove("doors")
    assert content(repository) == {}


def test_numbers_of_removed_models_survive_a_line_that_is_none(repository: Repository, tmp_path: Path) -> None:
    repository.path.mkdir()
    (repository.path / REMOVED).write_text("gates # by hand\nwindows\ndoors 3\n", encoding="utf-8")
    added(save(network(), tmp_path / "1.onnx"), repository)

    assert [*repository.models()["doors"].versions] == ["4"]


def test_removed_model_is_added_again_with_the_next_version(repository: Repository, tmp_path: Path) -> None:
    """A cache or an index that knows `doors:1` does not take another network for it, also after a second removal."""
    for number in (1, 2, 3):
        added(save(network(version=number), tmp_path / f"{number}.onnx"), repository)
        assert [*repository.models()["doors"].versions] == [str(number)]
        with repository.writing():
            repository.remove("doors")
    added(tmp_path / "1.onnx", repository, name="gates")
    with repository.writing():
        repository.remove("gates")
    added(tmp_path / "1.onnx", repository)

    assert [*repository.models()["doors"].versions] == ["4"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (None, {}, "there is no file"),
        (b"not a network", {}, "is not a complete ONNX network"),
        (network().SerializeToString()[:-1000], {}, "is not a complete ONNX network"),
        (network(names=""), {}, "does not name 3 classes: say --labels a,b,c or --labels names.txt"),
        (network(), {"labels": "a,b"}, "has 3 classes, not 2: say --labels"),
        (network(), {"size": "640"}, "takes 256 x 128 pixels: leave out --size"),
        (network("yolox"), {}, "say --head yolov5 or --head yolox"),
        (network(), {"head": "dfine"}, "do not fit --head dfine"),
        (network(task="pose"), {}, "does not say `kpt_shape`"),
        (network(), {"labels": "nowhere.txt"}, "nowhere.txt"),
    ],
)
def test_network_that_cannot_be_served_is_one_sentence(
    repository: Repository,
    tmp_path: Path,
    source: onnx.ModelProto | bytes | None,
    options: dict[str, str],
    message: str,
) -> None:
    if source is not None:
        (tmp_path / "best.onnx").write_bytes(source if isinstance(source, bytes) else source.SerializeToString())
    with refused(repository, message):
        added(tmp_path / "best.onnx", repository, **options)


def test_scores_without_a_sigmoid_are_refused(repository: Repository, tmp_path: Path) -> None:
    heads = head_tensors("yolo", SIZE)
    heads["output0"][4:] *= 5
    with refused(repository, "its scores are not between 0 and 1"):
        added(save(exported(heads, SIZE, names=NAMES), tmp_path / "best.onnx"), repository)


def test_class_without_a_label_is_refused(repository: Repository, tmp_path: Path) -> None:
    with refused(repository, "it found class 2, but there are 2 labels, from 0"):
        added(save(network("dfine", names=""), tmp_path / "best.onnx"), repository, labels="door,window")


def test_rows_of_zeros_are_padding(repository: Repository, tmp_path: Path) -> None:
    """As in an export with NMS inside."""
    heads = head_tensors("end_to_end", SIZE)
    heads["output0"][5:] = 0
    added(save(exported(heads, SIZE, names=NAMES), tmp_path / "best.onnx"), repository, head="end_to_end")


def test_weights_may_be_in_a_second_file(repository: Repository, tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "best.onnx", save_as_external_data=True, location="best.onnx.data", size_threshold=0)
    assert (tmp_path / "best.onnx.data").is_file()
    added(tmp_path / "best.onnx", repository)

    session = onnxruntime.InferenceSession(repository.path / "doors" / "1" / "model.onnx", providers=["CPUExecutionProvider"])
    (count,) = session.run(["num_dets"], {"image": np.zeros((1, 128, 256, 3), np.uint8)})
    assert count.min() > 0


def test_texts_of_the_file_cannot_damage_the_description(repository: Repository, tmp_path: Path) -> None:
    model = network(names={0: "do\x7for", 1: 'a "b", c', 2: "\x1b[31mred"}, license="MIT\x7f")
    added(save(model, tmp_path / "best.onnx"), repository, licence="")

    found = repository.load("doors")
    assert found is not None
    assert (found.labels, found.licence) == (("do?or", 'a "b", c', "?[31mred"), "MIT?")


def test_source_of_the_user_stays(repository: Repository) -> None:
    """What `add` has made is removed, and nothing else."""
    (own := repository.path / "doors").mkdir(parents=True)
    save(network(), own / "best.onnx")
    added(own, repository, None)
    with repository.writing():
        repository.remove("doors")

    assert [path.name for path in own.iterdir()] == ["best.onnx"]


def test_description_that_is_not_valid_does_not_hide_the_others(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(network(), tmp_path / "best.onnx")
    added(source, repository, "broken")
    added(source, repository, "whole")
    (repository.path / "broken" / "model.toml").write_text("labels = 3", encoding="utf-8")
    (repository.path / "whole" / "config.pbtxt").unlink()
    repository.write_configs()

    assert (repository.path / "whole" / "config.pbtxt").is_file()
    assert "warning" in capsys.readouterr().err


@pytest.mark.parametrize("options", [{"head": "yolo9"}, {"size": "big"}, {"size": "640x"}, {"mean": "1,2"}, {"iou": "much"}])
def test_options_are_checked(options: dict[str, str]) -> None:
    with pytest.raises(CommandError, match="an option is not valid"):
        read_options(options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("../doors", "is not a name"),
        ("", "is not a name"),
        ("a:1", "is not a name"),
        ("own", "versions or configs without a model.toml"),
        ("raw", "without a model.toml"),
    ],
)
def test_name_that_is_not_free_is_refused(repository: Repository, tmp_path: Path, name: str, message: str) -> None:
    (own := repository.path / "own").mkdir(parents=True)
    (own / "config.pbtxt").write_text('name: "own"', encoding="utf-8")
    (repository.path / "raw" / "1").mkdir(parents=True)
    (repository.path / "raw" / "1" / "model.onnx").touch()
    with refused(repository, message):
        added(save(network(), tmp_path / "best.onnx"), repository, name or "-")


@pytest.mark.parametrize("is_expected", [True, False])
def test_file_of_an_address_must_have_the_sha256(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_expected: bool
) -> None:
    file, authority, tls = save(network(), tmp_path / "best.onnx"), trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if is_expected else "0" * 64

    with answering(file.read_bytes(), tls=tls) as url, nullcontext() if is_expected else refused(repository, "its SHA-256 is"):
        request = Request(f"{url}/best.onnx", None, "MIT", check.SAMPLES, read_options({}), sha256=digest)
        assert add(request, repository, lambda _: "")[0] == "best"


def test_pickle_is_never_opened(repository: Repository, tmp_path: Path) -> None:
    (tmp_path / "best.pt").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with refused(repository, "is a pickle of PyTorch, .*: yolo export model=best.pt format=onnx"):
        added(tmp_path / "best.pt", repository)


def test_composed_model_that_finds_something_else_is_refused(repository: Repository, tmp_path: Path) -> None:
    """Boxes that are decoded twice overflow, as in the raw head that the option names."""
    boxes = head_tensors("yolov5", SIZE)["output"][:672]
    with refused(repository, r"boxes far outside of the image; is its head yolox, and was it exported with its sigmoid\?"):
        added(save(exported({"output": boxes}, SIZE, names=NAMES), tmp_path / "best.onnx"), repository, head="yolox")


def test_boxes_that_look_like_fractions_are_told(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save(exported(head_tensors("yolo"), SIZE, names=NAMES), tmp_path / "best.onnx")
    added(source, repository)
    warned = capsys.readouterr().err
    added(source, repository, "right", box_units="normalized")

    assert "warning: boxes look like fractions of the input; if so: nereid add ... --box-units normalized" in warned
    assert "fractions" not in capsys.readouterr().err


def test_detector_that_finds_few_boxes_in_the_samples_asks_for_more(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heads = head_tensors("end_to_end", SIZE)
    added(save(exported(heads, SIZE, names=NAMES), tmp_path / "many.onnx"), repository, head="end_to_end")
    of_many = capsys.readouterr().err
    heads["output0"][1:] = 0
    added(save(exported(heads, SIZE, names=NAMES), tmp_path / "few.onnx"), repository, head="end_to_end")

    assert "--samples" not in of_many
    assert "boxes; give --samples FOLDER of your own pictures to see more" in capsys.readouterr().err


def test_network_with_a_fixed_batch_takes_one_image_at_a_time(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its graph contains the batch in a place where it cannot be made dynamic."""
    model = network(batch=1)
    model.graph.node[0].CopyFrom(onnx.helper.make_node("Constant", [], ["images_only"], value_ints=[1]))
    added(save(model, tmp_path / "best.onnx"), repository)
    config = read_config_file(repository.path / "doors" / "config.pbtxt")

    assert config["max_batch_size"] == 1
    assert "one image at a time" in capsys.readouterr().err


def test_description_may_be_edited(repository: Repository, tmp_path: Path) -> None:
    added(save(network(), tmp_path / "best.onnx"), repository)
    path = repository.path / "doors" / "model.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"window"', '"Fenster \\"é"').replace("max_batch = 2", "max_batch = 8"), encoding="utf-8")
    repository.write_configs()
    config = read_config_file(config_path(repository.path / "doors", is_embedded=True))

    assert from_triton_config(config, "1").labels == ("door", 'Fenster "é', "gate")
    assert config["max_batch_size"] == 8
    path.write_text(text.replace("default_version = 1", "default_version = 7"), encoding="utf-8")
    with pytest.raises(CommandError, match=r"model.toml: default_version 7 is not among the versions 1"):
        repository.load("doors")


@pytest.mark.system
def test_killed_at_any_moment(repository: Repository, tmp_path: Path) -> None:
    """The old version stays, nothing is half-written, and the next addition succeeds."""
    added(save(network(version=0), tmp_path / "0.onnx"), repository)
    random, versions = np.random.default_rng(28), 1
    for index in range(1, 51):
        source = save(network(version=index), tmp_path / f"{index}.onnx")
        command = [*program.command("app", "add"), str(source), "--name", "doors", "--out", str(repository.path)]
        with subprocess.Popen(command, env=program.environment(), stderr=subprocess.DEVNULL) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(float(random.uniform(0.5, 2)))
            process.kill()
        found = repository.load("doors")
        assert found is not None
        assert versions <= len(found.versions) <= versions + 1
        versions = len(found.versions)
        for version in found.versions:
            onnx.checker.check_model(repository.path / "doors" / version / "model.onnx")
        spec = from_triton_config(read_config_file(repository.path / "doors" / "config.pbtxt"), "")
        assert str(spec.default_version) in found.versions
    assert versions > 1
    added(save(network(version="last"), tmp_path / "last.onnx"), repository)
    assert {path.name for path in repository.path.iterdir()} == {".lock", "doors"}
    found = repository.load("doors")
    assert found is not None
    assert found.default_version == len(found.versions) == versions + 1
