"""Reasons in Triton's log for which models could not be loaded."""

from pathlib import Path

from app.embedded.server import read_load_failures

# As Triton 2.51 has written it.
LOG = r"""
W1122 07:10:51.823760 29056 pinned_memory_manager.cc:273] "Unable to allocate pinned system memory"
[libprotobuf ERROR /tmp/text_format.cc:337] Error parsing text-format inference.ModelConfig: 1:35: Expected ":", found "{".
E1122 07:10:51.823924 29056 model_repository_manager.cc:1460] "Poll failed for model directory 'bad_config': failed to read text proto from /models/bad_config/config.pbtxt"
E1122 07:10:51.825322 29056 model_repository_manager.cc:1460] "Poll failed for model directory 'bad_name': unexpected directory name 'bad_name' for model 'good', directory name must equal model name"
E1122 07:10:51.828211 29056 model_repository_manager.cc:724] "failed to load model 'empty': at least one version must be available under the version policy of model 'empty'"
I1122 07:10:52.589961 29056 pb_stub.cc:366] "Failed to initialize Python stub: InvalidProtobuf: Protobuf parsing failed.\n\nAt:\n  model.py(1)"
E1122 07:10:52.590064 29056 backend_model.cc:692] "ERROR: Failed to create instance: InvalidProtobuf: Protobuf parsing failed.\n\nAt:\n  model.py(1)"
E1122 07:10:52.590124 29056 model_lifecycle.cc:642] "failed to load 'bad_onnx' version 1: Internal: InvalidProtobuf: Protobuf parsing failed.\n\nAt:\n  model.py(29): initialize\n"
I1122 07:10:52.590125 29056 model_lifecycle.cc:777] "failed to load 'bad_onnx'"
I1122 07:10:52.590126 29056 model_lifecycle.cc:839] "successfully loaded 'good'"
E1122 07:10:52.590614 29056 tritonserver.cc:2607] "Internal: failed to load all models"
"""  # noqa: E501


def test_each_model_has_its_reason(tmp_path: Path) -> None:
    (tmp_path / "triton.log").write_text(LOG, encoding="utf-8")

    assert read_load_failures(tmp_path / "triton.log") == {
        "bad_config": 'failed to read text proto from /models/bad_config/config.pbtxt (1:35: Expected ":", found "{")',
        "bad_name": "unexpected directory name 'bad_name' for model 'good', directory name must equal model name",
        "empty": "at least one version must be available under the version policy of model 'empty'",
        "bad_onnx": "Internal: InvalidProtobuf: Protobuf parsing failed",
    }


def test_a_log_without_failures_has_none(tmp_path: Path) -> None:
    (tmp_path / "triton.log").write_bytes(b"failed to load 'x'\n\xff\n")

    assert read_load_failures(tmp_path / "triton.log") == {}
