"""The head in chunks against one plain softmax over everything, gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from online_sao.algorithm import sao
from online_sao.learner.head import ActionScores, HeadScorer, LogitChange

N, D, V = 23, 8, 50


class Largest(TorchFunctionMode):
    """Remembers the largest tensor that any function returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def pieces(seed: int = 0) -> tuple[nn.Linear, nn.Linear, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    head = nn.Linear(D, V, bias=False, dtype=torch.float64)
    start_head = nn.Linear(D, V, bias=False, dtype=torch.float64)
    states = torch.randn(N, D, dtype=torch.float64, requires_grad=True)
    start_states = torch.randn(N, D, dtype=torch.float64)
    actions = torch.randint(0, V, (N,))
    temperatures = torch.rand(N) + 0.5
    return head, start_head, states, start_states, actions, temperatures


def weighted(scores: ActionScores, where: slice) -> Tensor:
    """A loss that sends another gradient into each token and each of the three scores."""
    w = torch.linspace(-1.0, 2.0, N, dtype=torch.float64)[where]
    return (w * scores.logprobs + (w + 3.0) * scores.kl - 0.5 * w * scores.entropy).sum()


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, N])
def test_chunks_equal_the_whole(reverse: bool, chunk: int) -> None:
    head, start_head, states, start_states, actions, temperatures = pieces()
    scorer = HeadScorer(head, start_head, reverse, True, chunk_elements=chunk * V)
    got = scorer.score(states, actions, temperatures, start_states, weighted)
    got_state_grad, got_head_grad = states.grad, head.weight.grad

    states.grad = head.weight.grad = None
    log_theta = sao.log_policy(head(states).float(), temperatures[:, None])
    log_start = sao.log_policy(start_head(start_states).float(), temperatures[:, None]).detach()
    pair = (log_start, log_theta) if reverse else (log_theta, log_start)
    want = ActionScores(
        log_theta.gather(1, actions[:, None]).squeeze(1),
        sao.kl_divergence(*pair),
        sao.entropy(log_theta),
    )
    weighted(want, slice(None)).backward()
    torch.testing.assert_close(got.logprobs, want.logprobs.detach())
    torch.testing.assert_close(got.kl, want.kl.detach())
    torch.testing.assert_close(got.entropy, want.entropy.detach())
    torch.testing.assert_close(got_state_grad, states.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_head_grad, head.weight.grad, rtol=1e-5, atol=1e-6)


def test_no_tensor_larger_than_a_chunk_is_ever_made() -> None:
    head, start_head, states, start_states, actions, temperatures = pieces()
    head.requires_grad_(False)
    scorer = HeadScorer(head, start_head, False, chunk_elements=4 * V)
    with Largest() as seen:
        scorer.score(states, actions, temperatures, start_states, weighted)
    assert 4 * V <= seen.numel <= max(4 * V, N * D)
    assert seen.numel < N * V


def test_without_an_objective_nothing_has_a_gradient() -> None:
    head, start_head, states, _, actions, temperatures = pieces()
    scores = HeadScorer(head, start_head, False).score(states, actions, temperatures, None, None)
    assert states.grad is None
    assert not scores.logprobs.requires_grad
    assert scores.kl.isnan().all()


def test_the_temperature_is_each_rollout_s_own() -> None:
    head, start_head, states, _, actions, _ = pieces()
    temperatures = torch.where(torch.arange(N) % 2 == 0, 0.5, 2.0)
    got = HeadScorer(head, start_head, False).score(states, actions, temperatures, None, None)
    logits = head(states).float()
    for n in (0, 1):
        want = (logits[n] / temperatures[n]).log_softmax(-1)[actions[n]]
        assert got.logprobs[n].item() == pytest.approx(want.item(), abs=1e-6)


def test_a_cap_and_a_scale_after_the_head_by_hand() -> None:
    """5 tanh(0.5 x / 5) at x = 10: 5 tanh(1) = 3.80797; slope 0.5 (1 - tanh(1)^2) = 0.20999."""
    x = torch.tensor([10.0], requires_grad=True)
    y = LogitChange(scale=0.5, cap=5.0)(x)
    y.backward()
    assert y.item() == pytest.approx(3.80797, abs=1e-5)
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(0.20999, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_follows_the_head_is_in_both_policies_scores_and_the_gradient(
    dtype: torch.dtype,
) -> None:
    head, start_head, states, start_states, actions, temperatures = pieces()
    change = LogitChange(scale=2.0, cap=1.5)
    head, start_head = head.to(dtype), start_head.to(dtype)
    states = states.detach().to(dtype).requires_grad_()
    start_states = start_states.to(dtype)
    scorer = HeadScorer(head, start_head, False, True, change, chunk_elements=7 * V)
    got = scorer.score(states, actions, temperatures, start_states, weighted)
    got_grad, states.grad = states.grad, None

    def plain(head: nn.Linear, states: Tensor) -> Tensor:
        logits = states.float() @ head.weight.float().T * 2.0
        return ((logits / 1.5).tanh() * 1.5 / temperatures[:, None]).log_softmax(-1)

    log_theta, log_start = plain(head, states), plain(start_head, start_states).detach()
    taken = log_theta.gather(1, actions[:, None]).squeeze(1)
    want = ActionScores(
        taken,
        (log_theta.exp() * (log_theta - log_start)).sum(1),
        -(log_theta.exp() * log_theta).sum(1),
    )
    weighted(want, slice(None)).backward()
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got.logprobs, want.logprobs.detach(), **close)
    torch.testing.assert_close(got.kl, want.kl.detach(), **close)
    assert got_grad is not None
    assert states.grad is not None
    loose = close if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(got_grad, states.grad, **loose)
