"""The two tasks: what is asked, how the environment answers, what a success is.

    tools     `37+85*2=`: the policy calls a calculator that takes one operation at a time, reads
              its answers, and writes the result. Two calls and an answer, where all goes well.
    single    `38152=`: the policy writes the digits in order. One turn, no tools.

Demonstrations for the warm start are imperfect on purpose, so that there is something to learn.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from online_sao.ablation import vocabulary as v

MAX_CALLS = 3
"""A fourth call ends the episode without a success."""
_NUMBER = r"-?\d{1,6}"
_CALL = re.compile(rf"<call>({_NUMBER})([+*-])({_NUMBER})</call>")
_APPLY: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the policy is asked, and the one right answer."""

    text: str
    answer: str

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt's tokens."""
        return v.encode(v.BOS + self.text)


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment answers and the episode goes on."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Final:
    """The episode is over."""

    reward: float


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a demonstration: written by the policy, or by the environment."""

    text: str
    action: bool


class Task(Protocol):
    """A task. Frozen: equal fields, equal task."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        ...

    @property
    def max_tokens(self) -> int:
        """Tokens of an episode with its prompt; one that reaches them is cut, reward 0."""
        ...

    def prompt(self, dice: random.Random) -> Prompt:
        """A fresh prompt."""
        ...

    def demonstration(self, prompt: Prompt, dice: random.Random) -> Sequence[Piece]:
        """An imperfect episode."""
        ...

    def answer(self, prompt: Prompt, turn: Sequence[int], calls: int) -> Observation | Final:
        """The environment's answer to a whole turn (it ends with `</call>` or `<end>`) of the
        policy, which has made `calls` calls before it.
        """
        ...


@dataclass(frozen=True, slots=True)
class ToolTask:
    """Arithmetic with a calculator."""

    filler: int = 4
    """Tokens the calculator writes before its result: how verbose the tool is."""

    @property
    def name(self) -> str:
        """`tools`."""
        return "tools"

    @property
    def max_tokens(self) -> int:
        """Room for three calls of ordinary size."""
        return 64 + MAX_CALLS * self.filler

    def prompt(self, dice: random.Random) -> Prompt:
        """Three numbers, two operations, no intermediate result below 0."""
        while True:
            first, second = dice.choice("+-*"), dice.choice("+-*")
            numbers = [dice.randint(2, 99) for _ in range(3)]
            if first == second == "*":
                continue
            for operator, place in ((first, 0), (second, 1)):
                if operator == "*":
                    numbers[place + dice.randint(0, 1)] = dice.randint(2, 9)
            text = f"{numbers[0]}{first}{numbers[1]}{second}{numbers[2]}"
            calls = calls_of(text)
            if min(evaluate(*call) for call in calls) >= 0:
                return Prompt(f"{text}=", str(evaluate(*calls[-1])))

    def observe(self, result: str) -> str:
        """What the calculator writes."""
        return f"{v.OBSERVATION}{v.FILLER * self.filler}{result}{v.OBSERVATION_END}"

    def answer(self, prompt: Prompt, turn: Sequence[int], calls: int) -> Observation | Final:
        """A call gets the operation's result, a malformed one `<error>`; a reply is judged."""
        text = v.decode(turn)
        if text.endswith(v.END):
            return Final(float(text == prompt.answer + v.END))
        if calls >= MAX_CALLS:
            return Final(0.0)
        found = _CALL.fullmatch(text)
        if found is None:
            return Observation(v.encode(self.observe(v.ERROR)))
        result = evaluate(int(found[1]), found[2], int(found[3]))
        return Observation(v.encode(self.observe(str(result))))

    def demonstration(self, prompt: Prompt, dice: random.Random) -> Sequence[Piece]:
        """Right in two cases of five; else without the tool, with a wrong call, or with a result
        that is copied wrongly.
        """
        kind = dice.choices(("right", "guess", "wrong_call", "miscopied"), (42, 18, 20, 20))[0]
        if kind == "guess":
            return (Piece(f"{dice.randint(2, 400)}{v.END}", True),)
        pieces: list[Piece] = []
        result = ""
        spoiled = dice.randrange(2) if kind == "wrong_call" else -1
        for number, call in enumerate(_chain(prompt.text)):
            left, operator, right = (part if part else result for part in call)
            if number == spoiled:
                left = _misread(left, dice)
            result = str(evaluate(int(left), operator, int(right)))
            pieces.append(Piece(f"{v.CALL}{left}{operator}{right}{v.CALL_END}", True))
            pieces.append(Piece(self.observe(result), False))
        shown = _misread(result, dice) if kind == "miscopied" else result
        return (*pieces, Piece(shown + v.END, True))


@dataclass(frozen=True, slots=True)
class SingleTask:
    """Digits to be written in order."""

    digits: int = 6

    @property
    def name(self) -> str:
        """`single`."""
        return "single"

    @property
    def max_tokens(self) -> int:
        """Room for a reply twice too long."""
        return 2 + 3 * self.digits

    def prompt(self, dice: random.Random) -> Prompt:
        """Digits at random."""
        digits = "".join(dice.choice("0123456789") for _ in range(self.digits))
        return Prompt(f"{digits}=", "".join(sorted(digits)))

    def answer(self, prompt: Prompt, turn: Sequence[int], calls: int) -> Observation | Final:
        """There are no tools: the first turn ends the episode."""
        return Final(float(v.decode(turn) == prompt.answer + v.END))

    def demonstration(self, prompt: Prompt, dice: random.Random) -> Sequence[Piece]:
        """Right in nine cases of twenty; else a digit changed, two exchanged, or one left out."""
        kind = dice.choices(("right", "changed", "exchanged", "left_out"), (45, 25, 20, 10))[0]
        digits = list(prompt.answer)
        place = dice.randrange(len(digits) - 1)
        if kind == "changed":
            digits = list(_misread(prompt.answer, dice))
        elif kind == "exchanged":
            digits[place], digits[place + 1] = digits[place + 1], digits[place]
        elif kind == "left_out":
            del digits[place]
        return (Piece("".join(digits) + v.END, True),)


def evaluate(left: int, operator: str, right: int) -> int:
    """One operation of the calculator."""
    return _APPLY[operator](left, right)


def calls_of(expression: str) -> tuple[tuple[int, str, int], tuple[int, str, int]]:
    """The two operations of `a op b op c`, in the order in which they must be done."""
    (left, operator, right), chained = _chain(expression)
    first = (int(left), operator, int(right))
    result = str(evaluate(*first))
    left, operator, right = (part if part else result for part in chained)
    return first, (int(left), operator, int(right))


def _chain(expression: str) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    """The two operations as written; an empty operand is the first one's result."""
    a, first, b, second, c = re.findall(r"\d+|[+*-]", expression)
    if second == "*" and first != "*":
        return (b, second, c), (a, first, "")
    return (a, first, b), ("", second, c)


def _misread(number: str, dice: random.Random) -> str:
    """One digit replaced by another."""
    place = dice.randrange(len(number))
    other = dice.choice([digit for digit in "0123456789" if digit != number[place]])
    return number[:place] + other + number[place + 1 :]


TASKS: dict[str, Task] = {task.name: task for task in (ToolTask(), SingleTask())}
"""By name."""
