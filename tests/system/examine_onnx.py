"""Parse and compile ONNX files as TensorRT does, without a GPU; a program in the environment of `requirements/tensorrt_rtx.txt`.

Arguments: width and height of the image, then the files. Prints a JSON object for each file: the errors of the parser and of the
compiler, and the types of what the convolutions give. RTX has no NonMaxSuppression: what follows one is not compiled.
"""

import json
import sys
from collections import Counter

import tensorrt_rtx_bindings as trt


class Log(trt.ILogger):
    def __init__(self):
        super().__init__()
        self.errors = []

    def log(self, severity, text):
        if severity <= trt.ILogger.ERROR:
            self.errors.append(text)


def examine(file, width, height):
    log = Log()
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    is_parsed = parser.parse_from_file(file)
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    types = Counter(layer.get_output(0).dtype.name for layer in layers if layer.type == trt.LayerType.CONVOLUTION)
    errors = [parser.get_error(index).desc() for index in range(parser.num_errors)]
    if not is_parsed:
        return {"parser": errors, "compiler": None, "convolutions": types}
    suppressions = [layer for layer in layers if layer.type == trt.LayerType.NMS]
    if suppressions:
        for output in [network.get_output(index) for index in range(network.num_outputs)]:
            network.unmark_output(output)
        for index in range(2):  # boxes and scores
            network.mark_output(suppressions[0].get_input(index))
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)  # otherwise that of the GPU
    profile = builder.create_optimization_profile()
    profile.set_shape("image", *([images, height, width, 3] for images in (1, 2, 2)))
    config.add_optimization_profile(profile)
    log.errors.clear()
    is_compiled = builder.build_serialized_network(network, config) is not None
    return {"parser": errors, "compiler": [] if is_compiled else log.errors, "convolutions": types}


if __name__ == "__main__":
    for path in sys.argv[3:]:
        print(json.dumps(examine(path, int(sys.argv[1]), int(sys.argv[2]))))
