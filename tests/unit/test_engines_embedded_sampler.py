"""One token from one row of logits, in vLLM's order of parameters."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from online_sao.engines.embedded import sampler
from online_sao.engines.embedded.reply import Draw, Reply
from online_sao.types import Sampling


class NoWords:
    """A vocabulary nobody looks at."""

    def decode(self, ids: Any) -> str:
        return ""

    def token(self, token_id: int) -> tuple[str, tuple[int, ...]]:
        return "", ()


def reply(sampling: Sampling, **more: Any) -> Reply:
    fields: dict[str, Any] = {
        "request_id": "r", "prompt_ids": (0,), "sampling": sampling, "max_tokens": 99,
        "eos_ids": frozenset(), "vocabulary": NoWords(), "sink": lambda _: None,
    }  # fmt: skip
    return Reply(**(fields | more))


def draws(logits: list[float], sampling: Sampling, times: int, **more: Any) -> list[Draw]:
    one = reply(sampling, **more)
    rows = torch.tensor([logits])
    return [sampler.draw(rows, [one])[0] for _ in range(times)]


def test_tokens_come_as_often_as_their_probability_says() -> None:
    """p = (1/2, 1/4, 1/8, 1/8): 4,000 draws, each count within four standard deviations."""
    probabilities = [0.5, 0.25, 0.125, 0.125]
    logits = [math.log(p) for p in probabilities]
    tokens = [d.token_id for d in draws(logits, Sampling(seed=3), 4000)]
    for token, p in enumerate(probabilities):
        assert abs(tokens.count(token) - 4000 * p) < 4 * math.sqrt(4000 * p * (1 - p))


@pytest.mark.parametrize("width", [7, 256, 300, 49152])
def test_every_uniform_number_finds_the_token_of_the_plain_cumulative_sum(width: int) -> None:
    torch.manual_seed(1)
    weights = torch.rand(5, width) ** 8
    weights[:, ::3] = 0.0
    uniforms = [0.0, 1 - 2**-53, 0.5, 0.123, 0.987]
    tokens, log_total = sampler._invert(weights, uniforms)
    cumulative = weights.double().cumsum(-1)
    for row, (u, token) in enumerate(zip(uniforms, tokens.tolist(), strict=True)):
        target, total = u * cumulative[row, -1].item(), cumulative[row, -1].item()
        assert weights[row, token] > 0
        assert cumulative[row, token].item() > target - 1e-6 * total
        assert cumulative[row, token].item() - weights[row, token].item() <= target + 1e-6 * total
    assert torch.allclose(log_total, weights.double().sum(-1).log().float(), atol=1e-5)


def test_logprobs_are_the_log_softmax_at_the_temperature_and_never_above_zero() -> None:
    logits = [2.0, 1.0, 0.0]
    for drawn in draws(logits, Sampling(temperature=0.5, seed=1), 20):
        expected = (torch.tensor(logits) / 0.5).log_softmax(-1)[drawn.token_id].item()
        assert drawn.logprob == pytest.approx(expected, abs=1e-6)
    assert draws([100.0, -100.0], Sampling(), 1)[0].logprob == 0.0


def test_temperature_zero_takes_the_likeliest_and_reports_it_at_temperature_one() -> None:
    (drawn,) = draws([0.0, 3.0, 1.0], Sampling(temperature=0.0), 1)
    assert drawn.token_id == 1
    assert drawn.logprob == pytest.approx(torch.tensor([0.0, 3.0, 1.0]).log_softmax(-1)[1].item())


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_renormalises() -> None:
    """p = (0.5, 0.3, 0.2), top_p 0.6: the first two are kept, as 5/8 and 3/8."""
    logits = [math.log(p) for p in (0.5, 0.3, 0.2)]
    drawn = draws(logits, Sampling(top_p=0.6, seed=2), 200)
    assert {d.token_id for d in drawn} == {0, 1}
    for d in drawn:
        assert math.exp(d.logprob) == pytest.approx((0.5, 0.3)[d.token_id] / 0.8, abs=1e-6)


def test_top_p_looks_beyond_its_first_candidates_when_these_hold_too_little() -> None:
    width = 4 * sampler.CANDIDATES
    drawn = draws([0.0] * width, Sampling(top_p=0.75, seed=5), 300)
    assert {round(math.exp(d.logprob) * 0.75 * width, 3) for d in drawn} == {1.0}


def test_top_k_and_min_p_cut_where_they_say() -> None:
    logits = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert {d.token_id for d in draws(logits, Sampling(top_k=2, seed=1), 100)} == {0, 1}
    kept = {d.token_id for d in draws(logits, Sampling(min_p=0.25, seed=1), 200)}
    assert kept == {0, 1, 2}  # 0.15 >= 0.25 x 0.5 > 0.05


def test_penalties_move_the_logits_as_in_vllm() -> None:
    sampling = Sampling(
        temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25
    )
    one = reply(sampling, prompt_ids=(0,))
    for token in (1, 1):
        one.take(Draw(token, -1.0), 0)
    # Token 0: 4/2. Token 1: 6/2 - 2 x 0.5 - 0.25. Token 2: -1, never seen.
    (drawn,) = sampler.draw(torch.tensor([[4.0, 6.0, -1.0]]), [one])
    assert drawn.token_id == 0
    assert drawn.logprob == pytest.approx(torch.tensor([2.0, 1.75, -1.0]).log_softmax(-1)[0].item())


def test_bans_and_biases_and_allowed_ids() -> None:
    greedy = {"temperature": 0.0}
    assert draws([5.0, 1.0, 0.0], Sampling(**greedy, logit_bias=((2, 9.0),)), 1)[0].token_id == 2  # type: ignore[arg-type]
    allowed = Sampling(**greedy, allowed_token_ids=(1, 2))  # type: ignore[arg-type]
    (drawn,) = draws([5.0, 1.0, 0.0], allowed, 1)
    assert drawn.token_id == 1
    assert drawn.logprob == pytest.approx(-math.log(1 + math.exp(-1)), abs=1e-6)
    assert draws([5.0, 1.0], Sampling(**greedy), 1, banned=((0,),))[0].token_id == 1  # type: ignore[arg-type]


def test_a_banned_word_of_two_tokens_is_banned_after_its_first_alone() -> None:
    one = reply(Sampling(temperature=0.0), banned=((2, 0),))
    row = torch.tensor([[5.0, 4.0, 3.0]])
    assert sampler.draw(row, [one])[0].token_id == 0
    one.take(Draw(2, -1.0), 0)
    assert sampler.draw(row, [one])[0].token_id == 1


def test_the_end_waits_for_min_tokens() -> None:
    one = reply(Sampling(temperature=0.0, min_tokens=2), eos_ids=frozenset({0}))
    row = torch.tensor([[5.0, 1.0]])
    for expected in (1, 1, 0):
        (drawn,) = sampler.draw(row, [one])
        assert drawn.token_id == expected
        one.take(drawn, 0)


def test_top_logprobs_are_the_likeliest_in_order() -> None:
    (drawn,) = draws([1.0, 3.0, 2.0], Sampling(top_logprobs=2, seed=1), 1)
    expected = torch.tensor([1.0, 3.0, 2.0]).log_softmax(-1)
    assert [t for t, _ in drawn.top] == [1, 2]
    assert [v for _, v in drawn.top] == pytest.approx([expected[1].item(), expected[2].item()])


def test_a_reply_draws_the_same_whatever_stands_beside_it() -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, 3, 50)
    alone, beside = reply(Sampling(seed=9)), reply(Sampling(seed=9))
    others = [reply(Sampling(seed=1, top_p=0.5)), reply(Sampling(temperature=0.0))]
    for step in logits:
        (a,) = sampler.draw(step[1:2], [alone])
        b = sampler.draw(step, [others[0], beside, others[1]])[1]
        assert (a.token_id, a.logprob) == (b.token_id, b.logprob)


def test_the_logits_given_in_fp32_are_left_alone() -> None:
    logits = torch.tensor([[1.0, 2.0]])
    sampler.draw(logits, [reply(Sampling(temperature=0.5, top_p=0.5))])
    assert logits.tolist() == [[1.0, 2.0]]
