"""The two tasks' environments, by hand."""

from __future__ import annotations

import random

import pytest

from online_sao.ablation import vocabulary as v
from online_sao.ablation.tasks import (
    MAX_CALLS,
    TASKS,
    Final,
    Observation,
    Prompt,
    SingleTask,
    ToolTask,
    calls_of,
)


def said(answer: Observation | Final) -> str | float:
    return v.decode(answer.ids) if isinstance(answer, Observation) else answer.reward


@pytest.mark.parametrize(
    ("expression", "calls"),
    [
        ("37+85*2", ((85, "*", 2), (37, "+", 170))),
        ("6*85-14", ((6, "*", 85), (510, "-", 14))),
        ("91-8-3", ((91, "-", 8), (83, "-", 3))),
    ],
)
def test_the_calculator_s_two_operations_in_their_order(expression: str, calls: object) -> None:
    assert calls_of(expression) == calls


@pytest.mark.parametrize(
    ("turn", "calls", "want"),
    [
        ("<call>85*2</call>", 0, "<obs>..170</obs>"),
        ("<call>5-9</call>", 1, "<obs>..-4</obs>"),
        ("<call>-4+9</call>", 1, "<obs>..5</obs>"),
        ("<call>85*</call>", 0, "<obs>..<error></obs>"),
        ("85*2</call>", 0, "<obs>..<error></obs>"),
        ("<call>37+85*2</call>", 0, "<obs>..<error></obs>"),
        ("<call>1+1</call>", MAX_CALLS, 0.0),
        ("207<end>", 0, 1.0),
        ("207<end>", MAX_CALLS, 1.0),
        ("208<end>", 2, 0.0),
        ("0207<end>", 2, 0.0),
        ("<end>", 0, 0.0),
    ],
)
def test_what_the_environment_says_to_a_turn(turn: str, calls: int, want: str | float) -> None:
    task = ToolTask(filler=2)
    assert said(task.answer(Prompt("37+85*2=", "207"), v.encode(turn), calls)) == want


@pytest.mark.parametrize(
    ("turn", "want"), [("12359<end>", 1.0), ("1235<end>", 0.0), ("12395<end>", 0.0)]
)
def test_sorting_is_right_or_wrong(turn: str, want: float) -> None:
    assert said(SingleTask().answer(Prompt("95321=", "12359"), v.encode(turn), 0)) == want


def test_every_prompt_s_own_calls_lead_to_its_answer() -> None:
    dice, task = random.Random(1), ToolTask()
    for _ in range(200):
        prompt = task.prompt(dice)
        # Python knows the order of operations too.
        assert str(eval(prompt.text.removesuffix("="))) == prompt.answer
        assert int(prompt.answer) >= 0


@pytest.mark.parametrize("name", sorted(TASKS))
def test_about_two_in_five_demonstrations_are_right(name: str) -> None:
    task, dice = TASKS[name], random.Random(2)
    right = 0
    for _ in range(1000):
        prompt = task.prompt(dice)
        pieces = task.demonstration(prompt, dice)
        assert pieces[-1].action
        right += pieces[-1].text == prompt.answer + v.END
        text = "".join(piece.text for piece in pieces)
        assert len(v.encode(prompt.text + text)) < task.max_tokens
    assert 0.35 < right / 1000 < 0.6


def test_a_demonstration_s_observations_are_the_calculator_s_and_no_action() -> None:
    task, dice = ToolTask(filler=1), random.Random(3)
    seen = 0
    for _ in range(50):
        for call, answer in zip(
            *(iter(task.demonstration(task.prompt(dice), dice)),) * 2, strict=False
        ):
            assert (call.action, answer.action) == (True, False)
            observed = task.answer(Prompt("", ""), v.encode(call.text), 0)
            assert said(observed) == answer.text
            seen += 1
    assert seen > 50


def test_tokens_and_text() -> None:
    assert v.decode(v.encode("<bos>12*3=<call>")) == "<bos>12*3=<call>"
    assert len(v.encode("<obs>..7</obs>")) == 5
    with pytest.raises(KeyError):
        v.encode("12/3")
