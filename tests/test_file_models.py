"""Models that take encoded files: the same contract in production, where DALI decodes, and in the embedded Triton."""

from typing import Any

import msgspec
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from app.model.heads import DetectionHead, OutputFormat
from app.model.spec import DECODED, InputFormat
from app.triton.repository import loadable_models
from tests.support import REPOSITORY
from tests.test_model_repository import EMBEDDED, ENTRIES, FILE_MODELS, PRODUCTION, parsed, spec_of

pytestmark = pytest.mark.parametrize("name", FILE_MODELS)
both = pytest.mark.parametrize("file", [PRODUCTION, EMBEDDED])

Tensors = dict[str, tuple[int, list[int]]]


def tensors(declared: Any) -> Tensors:  # noqa: ANN401
    return {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in declared}


def steps(name: str) -> list[tuple[model_config_pb2.ModelEnsembling.Step, model_config_pb2.ModelConfig]]:
    drawing, finding = parsed(name, PRODUCTION).ensemble_scheduling.step
    text = (REPOSITORY / drawing.model_name / PRODUCTION).read_text(encoding="utf-8")
    letterbox = text_format.Parse(text, model_config_pb2.ModelConfig())
    return [(drawing, letterbox), (finding, parsed(finding.model_name, PRODUCTION))]


def network_of(name: str) -> str:
    """Return the model of the ensemble that finds the objects: its last step."""
    return str(steps(name)[-1][0].model_name)


@both
def test_model_takes_files_and_tells_which_it_could_not_decode(name: str, file: str) -> None:
    spec, of_pixels = spec_of(name, file), spec_of(network_of(name), file)
    own = {"name": name, "input_name": "file", "dtype": None, "input_format": InputFormat.FILE, "tells_decoded": True}

    assert spec.expect_head(DetectionHead).output_format is OutputFormat.END_TO_END
    assert spec.requested_names == (*of_pixels.output_names, DECODED)
    size = {"max_batch": spec.max_batch, "instances": spec.instances, "priority_levels": spec.priority_levels}
    assert spec == msgspec.structs.replace(of_pixels, backend=spec.backend, formats=spec.formats, **size, **own)


def test_production_and_embedded_configs_differ_in_device_and_formats_alone(name: str) -> None:
    """The gateway must treat the model the same way wherever it runs; the embedded one decodes all that the gateway does."""
    production, embedded = spec_of(name, PRODUCTION), spec_of(name, EMBEDDED)

    assert (production.device, embedded.device) == ("gpu", "cpu")
    assert (production.formats, embedded.formats) == ("JPEG,PNG,WEBP,BMP", "")
    own = {"backend": embedded.backend, "formats": "", "max_batch": embedded.max_batch, "instances": embedded.instances}
    own["priority_levels"] = embedded.priority_levels
    assert msgspec.structs.replace(production, device="cpu", **own) == embedded


def test_network_is_the_one_of_the_registry(name: str) -> None:
    network = msgspec.structs.replace(ENTRIES[name], title="", pixel_model=None)

    assert network == msgspec.structs.replace(ENTRIES[network_of(name)], title="")


def test_tensors_agree_across_the_ensemble(name: str) -> None:
    ensemble = parsed(name, PRODUCTION)
    known = tensors(ensemble.input)
    for step, model in steps(name):
        inputs, outputs = tensors(model.input), tensors(model.output)
        assert dict(step.input_map).keys() == inputs.keys()
        assert all(known[source] == inputs[target] for target, source in step.input_map.items())
        assert not known.keys() & set(step.output_map.values())
        known |= {target: outputs[source] for source, target in step.output_map.items()}

    assert ensemble.platform == "ensemble"
    assert tensors(ensemble.output).items() <= known.items()


def test_no_step_takes_fewer_images_than_the_ensemble(name: str) -> None:
    """Triton would reject the ensemble."""
    assert {model.max_batch_size for _, model in steps(name)} == {parsed(name, PRODUCTION).max_batch_size}


def test_letterbox_is_that_of_the_gateway(name: str) -> None:
    spec = spec_of(name, PRODUCTION)
    (_, letterbox), _ = steps(name)
    width, height = spec.input_size

    assert {key: value.string_value for key, value in letterbox.parameters.items()} == {
        "placement": spec.placement,
        "enlarge": str(spec.enlarge).lower(),
        "pad": str(spec.pad),
    }
    assert tensors(letterbox.output)["image"] == (model_config_pb2.TYPE_UINT8, [height, width, 3])


def test_letterbox_runs_each_request_alone(name: str) -> None:
    """DALI fails for a batch as a whole; the time that this takes is not taken from other requests."""
    (_, letterbox), _ = steps(name)

    assert letterbox.backend == "python"
    assert not letterbox.HasField("dynamic_batching")
    assert [group.kind for group in letterbox.instance_group] == [model_config_pb2.ModelInstanceGroup.KIND_GPU]


def test_embedded_triton_passes_over_the_letterbox(name: str) -> None:
    """It has no DALI, and would report a model that cannot be loaded."""
    (step, _), _ = steps(name)

    assert (REPOSITORY / step.model_name / "1" / "model.py").is_file()
    assert step.model_name not in loadable_models(REPOSITORY)


def test_embedded_requests_are_batched_and_the_queue_is_bounded(name: str) -> None:
    config, of_pixels = parsed(name, EMBEDDED), parsed(network_of(name), EMBEDDED)

    assert config.backend == "onnxruntime"
    for part in ("max_batch_size", "dynamic_batching", "instance_group"):
        assert getattr(config, part) == getattr(of_pixels, part)
    assert [dict(warmup.inputs).keys() for warmup in config.model_warmup] == [{"file"}]
