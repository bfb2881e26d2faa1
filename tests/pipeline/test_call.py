"""Questions about images."""

import pytest

from app.model.heads import HEADS, TASKS, Head
from app.pipeline import call


def test_tasks_and_heads_belong_together() -> None:
    """One for each."""
    assert [head.task for head in HEADS] == list(TASKS)


@pytest.mark.parametrize("head", HEADS, ids=lambda head: str(head.task))
def test_each_task_has_a_trivial_question(head: type[Head]) -> None:
    """Without it, a model of the task would fail in its warm-up and in probes."""
    question = call._TRIVIAL[head.task]("mine")  # noqa: SLF001 - no model of a new task exists for the tests of a public function

    assert (question.model, question.task) == ("mine", head.task)
