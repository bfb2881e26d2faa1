"""Non-maximum suppression, also for an export to ONNX."""

import sys

import torch


class _NonMaxSuppression(torch.autograd.Function):
    @staticmethod
    def forward(_context: object, boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
        """Return the indices of the boxes that are kept, best first."""
        order = scores.argsort(descending=True, stable=True)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        kept = []
        while len(order):
            best, others = order[0], order[1:]
            kept.append(best)
            sides = torch.minimum(boxes[best, 2:], boxes[others, 2:]) - torch.maximum(boxes[best, :2], boxes[others, :2])
            shared = sides.clamp(min=0).prod(1)
            order = others[shared <= threshold * (areas[best] + areas[others] - shared)]
        return torch.stack(kept) if kept else order

    @staticmethod
    def symbolic(graph: torch.Graph, boxes: torch.Value, scores: torch.Value, threshold: float) -> torch.Value:
        """Return the same in ONNX, as torchvision exports it."""

        def constant(value: object) -> torch.Value:
            return graph.op("Constant", value_t=torch.tensor(value))

        selected = graph.op(
            "NonMaxSuppression",
            graph.op("Unsqueeze", boxes, constant([0])),
            graph.op("Unsqueeze", scores, constant([0, 1])),
            constant([sys.maxsize]),
            constant([threshold]),
        )
        return graph.op("Gather", selected, constant(2), axis_i=1)


nms = _NonMaxSuppression.apply
