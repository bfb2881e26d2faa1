"""From the head of a classification network to a probability for each class."""

from collections.abc import Sequence

import onnx
from onnx import compose

from app.zoo.graph import parse
from app.zoo.registry import ClassificationRecipe


def read_head(sizes: Sequence[int], recipe: ClassificationRecipe) -> onnx.ModelProto:
    """Build what follows a classification network.

    Args:
        sizes: Of the network's output, with the batch; 0 where they are free.
        recipe: What the head's numbers are.

    Returns:
        A graph with the head as its input; `probabilities` FP32 (batch, classes) out, each row with the sum 1.

    Raises:
        ValueError: The output is not a number for each class.
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
