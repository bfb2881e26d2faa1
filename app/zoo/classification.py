"""The graph from the head of a classification network to class probabilities."""

from collections.abc import Sequence

import onnx
from onnx import compose

from app.zoo.graph import parse
from app.zoo.registry import ClassificationRecipe


def read_head(sizes: Sequence[int], recipe: ClassificationRecipe) -> onnx.ModelProto:
    """Build the graph that follows a classification network.

    Args:
        sizes: Dimensions of the network's output, including the batch; 0 for dynamic dimensions.
        recipe: The recipe with the kind of scores.

    Returns:
        A graph with the head as its input and `probabilities`, FP32 (batch, classes), as its output; each row sums to 1.

    Raises:
        ValueError: The output does not have the shape (batch, classes).
    """
    if len(sizes) != 2 or sizes[1] < 2:  # noqa: PLR2004 - the batch, and at least two classes
        raise ValueError(f"the output {tuple(sizes)} is not a number for each class")
    return compose.add_prefix(parse(_FROM[recipe.head].format(classes=sizes[1])), "classify/", rename_outputs=False)


_FROM = {
    "logits": """
classify (float[batch, {classes}] head) => (float[batch, {classes}] probabilities) {{
    probabilities = Softmax <axis = 1> (head)
}}""",
    "probabilities": """
classify (float[batch, {classes}] head) => (float[batch, {classes}] probabilities) {{
    probabilities = Identity (head)
}}""",
}
