"""Adding a network makes a checked model that the gateway understands, or changes nothing; hostile files are contained."""

import ctypes
import errno
import faulthandler
import fcntl
import hashlib
import os
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import onnx
import pytest
import trustme

from app.host import program, sandbox
from app.host.program import CommandError
from app.model.heads import DetectionHead, PoseHead
from app.model.spec import are_interchangeable
from app.triton.config_file import read_config_file
from app.triton.repository import loadable_models
from app.zoo.add import Request, add
from app.zoo.listing import describe_models
from app.zoo.recognize import read_options
from app.zoo.repository import Repository
from tests.fakes.http import answering
from tests.processes import wait_for
from tests.support import IMAGES
from tests.zoo.adding import added, blank_outputs, content, new_repository, refused, spec_of  # noqa: F401 - a fixture
from tests.zoo.exported import FEATURES, WIDE, exported, feature_tensors, head_tensors
from tests.zoo.hostile import add_hostile, hostile, mutated

NAMES = {0: "door", 1: "window", 2: "gate"}


def network(head: str = "yolo", tensors: dict[str, Any] | None = None, **options: Any) -> onnx.ModelProto:  # noqa: ANN401
    return exported(tensors or head_tensors(head), WIDE, **{"names": NAMES, **options})


@pytest.mark.parametrize(
    ("head", "options", "max_iou"),
    [
        ("yolo", {"iou": "0.45"}, 0.45),
        ("yolov5", {}, 0.45),
        ("yolox", {}, 0.45),
        ("deepstream", {}, 0.45),
        ("four_tensors", {}, 1),
        ("end_to_end", {"head": "end_to_end"}, 1),
        ("rtdetr", {"head": "rtdetr"}, 1),
        ("rtdetr_topk", {"head": "rtdetr_topk"}, 1),
        ("rfdetr", {}, 1),
        ("dfine", {}, 1),
        ("detr", {}, 1),
        ("detr_sigmoid", {}, 1),
    ],
)
def test_detector_of_each_head_is_served(repository: Repository, head: str, options: dict[str, str], max_iou: float) -> None:
    added(network(head), repository, **options)
    embedded, spec = (spec_of(repository, is_embedded=is_embedded) for is_embedded in (True, False))

    assert loadable_models(repository.path) == ["doors"]
    assert spec.input_is_canvas
    assert (spec.input_size, spec.labels, spec.default_version) == (WIDE, tuple(NAMES.values()), 1)
    assert (spec.licence, spec.device, embedded.device) == ("MIT", "gpu", "cpu")
    assert are_interchangeable(spec, embedded)
    assert spec.expect_head(DetectionHead).max_iou == max_iou
    assert blank_outputs(repository, images=2)["num_dets"].min() > 0


def test_detector_that_finds_nothing_is_told_as_not_checked(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    """With samples of the user it is refused, unless the user accepts it."""
    added(nothing := network(tensors={"output0": np.zeros((7, 672))}), repository)
    assert (
        "doors:1 is not checked, because it finds nothing in the photos that are built in: give --samples"
        in capsys.readouterr().err
    )
    assert spec_of(repository).is_checked is False
    assert next(describe_models(repository, {})).endswith("versions 1 (default, not checked)")
    with refused(repository, "other classes than doors"):
        added(nothing, repository, labels="door,window,roof")
    onnx.save(nothing, path := repository.path.with_name("nothing.onnx"))
    request = Request(str(path), "doors", "", IMAGES, read_options({}))
    with refused(
        repository, r"finds nothing in .*--channels BGR, --scale 1, .*--mean 0\.485.*; --accept adds it as it is"
    ) as caught:
        add(request, repository, lambda _: "")
    assert caught.value.exit_code == 3
    add(request._replace(is_accepted=True), repository, lambda _: "")
    added(network(), repository)
    assert (repository.models()["doors"].unchecked, spec_of(repository, version="2").is_checked) == (("1",), True)


@pytest.mark.parametrize(("task", "head"), [("segmentation", "yolo"), ("pose", "end_to_end"), ("obb", "yolo")])
def test_network_with_features_is_served(repository: Repository, task: str, head: str) -> None:
    added(network(tensors=feature_tensors(task, head), **FEATURES[task]), repository)
    spec, config = spec_of(repository), read_config_file(repository.path / "doors" / "config.pbtxt")

    assert spec.head.task == task
    assert are_interchangeable(spec, spec_of(repository, is_embedded=True))
    assert spec.max_batch == (64 if task == "pose" else 8)
    assert not isinstance(spec.head, PoseHead) or spec.head.keypoint_names == ("nose", "tail")
    assert {tensor["name"]: [2, *map(int, tensor["dims"])] for tensor in config["output"]} == {
        name: list(tensor.shape) for name, tensor in blank_outputs(repository, images=2).items()
    }


def test_model_gets_no_larger_batch_than_the_nms_inside_the_network(repository: Repository) -> None:
    for name, batch, largest in (("of_8", "8", (2, 8)), ("of_1", "True", (1, 1)), ("any", "0.5", (2, 64))):
        inside = network("end_to_end", args={"nms": True})
        inside.metadata_props.add(key="batch", value=batch)
        added(inside, repository, name, head="end_to_end")
        model = repository.models()[name]
        assert (model.embedded.max_batch, model.production.max_batch) == largest


def test_name_and_labels_are_found_beside_the_file(repository: Repository) -> None:
    """A second file has the weights. What `add` has made is removed, and nothing else."""
    (folder := repository.path / "own").mkdir(parents=True)
    source = folder / "my best (2).onnx"
    onnx.save(network(names=""), source, save_as_external_data=True, location="it.onnx.data", size_threshold=0)
    (folder / "labels.txt").write_text("a\nb, c\n\nd\n", encoding="utf-8")
    for path, name in ((source, "my_best_2_"), (folder, "own")):
        assert added(path, repository, None) == name
        assert repository.models()[name].labels == ("a", "b, c", "d")
        assert blank_outputs(repository, name)["num_dets"].min() > 0
    with repository.writing():
        repository.remove("own")
    assert {path.name for path in folder.iterdir()} == {source.name, "it.onnx.data", "labels.txt"}
    (folder / "it.onnx.data").unlink()
    with refused(repository, r"has its weights in it\.onnx\.data, not beside it: put it there, or add a zip"):
        added(source, repository)


def test_labels_of_the_command_line_may_be_long_or_json() -> None:
    labels = [f"class number {number}" for number in range(80)]
    assert read_options({"labels": ",".join(labels)}).labels == tuple(labels)
    assert read_options({"labels": '["a, b", "c"]'}).labels == ("a, b", "c")


def test_same_name_makes_the_next_version(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    added(network(), repository, iou="0.5")
    heads = head_tensors("yolo")
    heads["output0"][:, :100] = 0  # finds less
    added(network(tensors=heads), repository, licence="")  # `iou` is that of the model

    model = repository.models()["doors"]
    assert (list(model.versions), model.default_version, model.licence, model.source) == (["1", "2"], 2, "MIT", "best.onnx")
    said = capsys.readouterr().err
    agreeing, boxes = map(int, re.findall(r"doors:2 and doors:1 agree in (\d+) of (\d+) boxes", said)[0])
    assert 0 < agreeing < boxes
    assert "give --samples" not in said
    for other, message in (
        (network(tensors=heads), r"doors:2 is this very file; .*nereid use doors:2"),
        (network(names={**NAMES, 1: "roof"}), "other classes than doors"),
        (network(tensors={"logits": np.zeros(3)}), "another task than doors"),
    ):
        with refused(repository, message):
            added(other, repository)


def test_versions_are_chosen_and_removed(repository: Repository) -> None:
    for index in range(3):
        added(network(version=index), repository)
    with repository.writing():
        repository.use("doors:1")
        assert spec_of(repository).default_version == 1
        repository.remove("doors:2")
    assert sorted(path.name for path in (repository.path / "doors").iterdir() if path.is_dir()) == ["1", "3", "configs"]
    with repository.writing():
        repository.remove("doors:3")
    added(network(version=4), repository)  # the number of a removed version is not given again
    with repository.writing():
        repository.use("doors:1")
    for reference, message in (
        ("doors:1", "doors:1 is the default version; first: nereid use doors:4"),
        ("doors:2", "doors has no version 2; it has 1, 4"),
        ("../doors", r"'\.\./doors' is not a name"),
    ):
        with refused(repository, message), repository.writing():
            repository.remove(reference)
    with repository.writing():
        repository.remove("doors")
    assert content(repository) == {}
    added(network(), repository)  # a cache or an index that knows doors:1 does not take another network for it
    assert [*repository.models()["doors"].versions] == ["5"]


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (None, {}, "there is no file"),
        (network(), {"labels": "a,,b"}, "class 1 of .* has no name"),
        (network().SerializeToString()[:-1000], {}, "is not a complete ONNX network"),
        (network(tensors={"output0": head_tensors("yolo")["output0"] * 5}), {}, "its scores are not between 0 and 1"),
        (network("rtdetr"), {"head": "rtdetr", "multi_label": "true"}, "multi_label is for the heads yolo, yolov5, yolox"),
        (network("deepstream", names=""), {"labels": "door,window"}, "it found class 2, but there are 2 labels, from 0"),
    ],
)
def test_network_that_cannot_be_served_is_one_sentence(
    repository: Repository, tmp_path: Path, source: onnx.ModelProto | bytes | None, options: dict[str, str], message: str
) -> None:
    path = tmp_path / "best"
    if source is not None:
        path.write_bytes(source if isinstance(source, bytes) else source.SerializeToString())
    with refused(repository, message):
        added(path, repository, **options)


def test_name_that_is_not_free_and_a_pickle_are_refused(repository: Repository, tmp_path: Path) -> None:
    (own := repository.path / "own").mkdir(parents=True)
    (own / "config.pbtxt").write_text('name: "own"', encoding="utf-8")
    (tmp_path / "best.pt").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    for source, name, message in (
        (network(), "a:1", "is not a name"),
        (network(), "own", "versions or configs without a model.toml"),
        (tmp_path / "best.pt", "doors", "is a pickle of PyTorch, .*: yolo export model=best.pt format=onnx"),
    ):
        with refused(repository, message):
            added(source, repository, name)


@pytest.mark.parametrize("is_expected", [True, False])
def test_file_of_an_address_must_have_the_sha256(
    repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_expected: bool
) -> None:
    file, authority, tls = network().SerializeToString(), trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    digest = hashlib.sha256(file).hexdigest() if is_expected else "0" * 64

    with answering(file, tls=tls) as url, nullcontext() if is_expected else refused(repository, "its SHA-256 is"):
        request = Request(f"{url}/best.onnx", None, "MIT", None, read_options({}), sha256=digest)
        assert add(request, repository, lambda _: "")[0] == "best"


def test_description_may_be_edited_and_a_wrong_one_does_not_hide_the_others(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    added(network(), repository)
    added(network(), repository, "broken")
    (repository.path / "broken" / "model.toml").write_text("labels = 3", encoding="utf-8")
    path = repository.path / "doors" / "model.toml"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace('"window"', '"Fenster \\"é"').replace("max_batch = 2", "max_batch = 8"), encoding="utf-8")
    repository.write_configs()
    spec = spec_of(repository, is_embedded=True)

    assert (spec.labels, spec.max_batch) == (("door", 'Fenster "é', "gate"), 8)
    assert "warning" in capsys.readouterr().err


@pytest.mark.system
def test_killed_at_any_moment(repository: Repository, tmp_path: Path) -> None:
    """The old version stays, nothing is half-written, and the next addition succeeds."""
    added(network(version=0), repository)
    random, versions = np.random.default_rng(28), 1
    for index in range(1, 51):
        onnx.save(network(version=index), tmp_path / f"{index}.onnx")
        command = [*program.command("app", "add"), f"{tmp_path}/{index}.onnx", "--name", "doors", "--out", str(repository.path)]
        with subprocess.Popen(command, env=program.environment(), stderr=subprocess.DEVNULL) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(float(random.uniform(0.5, 2)) if index % 10 else None)
            process.kill()
        model = repository.models()["doors"]
        assert versions <= len(model.versions) <= versions + 1
        versions = len(model.versions)
        for version in model.versions:
            onnx.checker.check_model(repository.path / "doors" / version / "model.onnx")
        assert str(spec_of(repository).default_version) in model.versions
    assert versions > 1
    added(network(version="last"), repository)
    assert {path.name for path in repository.path.iterdir()} == {".lock", "doors"}
    model = repository.models()["doors"]
    assert model.default_version == len(model.versions) == versions + 1


IN_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child"]
"""Gives a process the id 1: the processes of two hosts may have the same."""


def test_lock_is_possible_on_nfs_and_without_locks_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flock = fcntl.flock

    def nfs(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX and fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", nfs)
    with Repository(tmp_path).writing():
        with pytest.raises(CommandError, match="another process changes the models"), Repository(tmp_path).writing():
            pass
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
        with (
            pytest.raises(CommandError, match=r"/\.lock cannot be locked: .*; write to a local folder"),
            Repository(tmp_path).writing(),
        ):
            pass


@pytest.mark.system
@pytest.mark.skipif(
    subprocess.run([*IN_NAMESPACE, "true"], check=False, capture_output=True).returncode != 0,
    reason="making namespaces of processes needs root or CAP_SYS_ADMIN",
)
def test_writers_of_several_hosts_lose_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    killed = start_to_add(tmp_path, folder, "killed", is_complete=False)
    wait_for(lambda: any(folder.glob(".add-*/*")))
    others = [start_to_add(tmp_path, folder, f"{index}") for index in range(3)]
    logs = [tmp_path / f"{index}.log" for index in range(3)]
    wait_for(lambda: all("waiting for another process" in log.read_text() for log in logs))
    assert killed.poll() is None
    killed.kill()
    killed.communicate()
    assert [process.wait() for process in others] == [0, 0, 0]
    assert start_to_add(tmp_path, folder, "last").wait() == 0
    found = Repository(folder).load("doors")

    assert found is not None
    assert (list(found.versions), found.default_version, len({*found.versions.values()})) == (["1", "2", "3", "4"], 4, 4)
    for version in found.versions:
        onnx.checker.check_model(folder / "doors" / version / "model.onnx")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    texts = {"doors/model.toml", "doors/config.pbtxt", "doors/configs/embedded.pbtxt"}
    assert files == {".lock", *texts, *(f"doors/{version}/model.onnx" for version in found.versions)}


def start_to_add(tmp_path: Path, folder: Path, name: str, *, is_complete: bool = True) -> "subprocess.Popen[bytes]":
    """Start to add a network as another host does, or to wait for its file, to which nothing comes; messages are in `name`.log."""
    command = [*IN_NAMESPACE, *program.command("app", "add"), "-", "--name", "doors", "--out", str(folder)]
    with (tmp_path / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=program.environment(), stdin=subprocess.PIPE, stderr=log)
    assert process.stdin is not None
    if is_complete:
        process.stdin.write(network(version=name).SerializeToString())
        process.stdin.close()
    return process


def crash() -> str:
    faulthandler.disable()
    return str(ctypes.string_at(0))


@pytest.mark.parametrize(
    ("work", "message"),
    [
        (Mock(side_effect=signal.pause), "takes more than 0.5 s"),
        (lambda: "x" * (1 << 33), "the check of the file needs more than 4 GiB"),
        (crash, "was ended by SIGSEGV: it crashes ONNX Runtime, or needs more than 4 GiB"),
        (lambda: os._exit(0), "was ended: it crashes"),
        (lambda: repr(socket.socket()), "Operation not permitted"),
        (Mock(side_effect=CommandError("no")), "^no$"),
    ],
)
def test_failure_in_the_sandbox_is_one_sentence(monkeypatch: pytest.MonkeyPatch, work: Callable[[], str], message: str) -> None:
    if "0.5 s" in message:
        monkeypatch.setattr(sandbox, "_SECONDS", 0.5)
    with pytest.raises(CommandError, match=message):
        sandbox.run(work, str)


def test_hostile_networks_are_added_or_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "_SECONDS", 2.0)
    reasons = {kind: add_hostile(content, Repository(tmp_path)) for kind, content in hostile(8)}
    assert reasons["endless"] == "the check of the file takes more than 2 s"
    assert all(reasons[kind] for kind in ("claiming", "expanding", "nested"))
    assert "does not run on blank images" in reasons["limited"]
    assert re.search("own:Own.* is not a registered|Cycle detected", reasons["foreign"])
    assert re.search("external TensorProto|should be stored in|its weights in", reasons["outside"])


def test_weights_that_onnx_does_not_look_for_are_not_read(tmp_path: Path) -> None:
    """ONNX Runtime would read them."""
    network = exported({"output0": (7, 84)}, (64, 64))
    weight = onnx.TensorProto(name="w", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="network.onnx")
    network.training_info.add().initialization.initializer.append(weight)
    assert "weights in other files" in add_hostile(network.SerializeToString(), Repository(tmp_path))


def test_damaged_networks_are_added_or_refused(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    whole = exported({"output0": (7, 84)}, (64, 64)).SerializeToString()
    assert add_hostile(whole, repository) == ""
    assert sum(bool(add_hostile(content, repository)) for content in mutated(whole, 10)) > 5  # some have another weight only
