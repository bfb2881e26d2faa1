"""Triton configs of models, in short."""

from typing import Any

from app.model.spec import ModelSpec, from_triton_config

Tensor = tuple[str, str, list[int | str]]


def table(*dims: int, name: str = "o", data_type: str = "TYPE_FP32") -> Tensor:
    return (name, data_type, list(dims))


IMAGES: Tensor = table(3, 640, 640, name="images")
VARIABLE: Tensor = table(3, -1, -1, name="images")
FILE: Tensor = table(1, name="file", data_type="TYPE_STRING")
END_TO_END: tuple[Tensor, ...] = (
    table(1, name="num_dets", data_type="TYPE_INT32"),
    table(100, 4, name="det_boxes"),
    table(100, name="det_scores"),
    table(100, name="det_classes", data_type="TYPE_INT32"),
)
SIX_COLUMNS, YOLO, YOLOV5, YOLOX, RTDETR = table(300, 6), table(84, 8400), table(25200, 85), table(8400, 85), table(300, 84)


def config(*outputs: Tensor, image: Tensor = IMAGES, batch: int = 1, **parameters: str) -> dict[str, Any]:
    def tensors(*configured: Tensor) -> list[dict[str, Any]]:
        return [{"name": name, "data_type": data_type, "dims": dims} for name, data_type, dims in configured]

    return {
        "name": "m",
        "backend": "onnxruntime",
        "max_batch_size": batch,
        "input": tensors(image),
        "output": tensors(*(outputs or (SIX_COLUMNS,))),
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
    }


def spec_of(*outputs: Tensor, image: Tensor = IMAGES, batch: int = 1, **parameters: str) -> ModelSpec:
    return from_triton_config(config(*outputs, image=image, batch=batch, **parameters), "1")
