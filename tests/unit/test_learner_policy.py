"""The policy beside its start: one shared trunk gives what two whole networks give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import VOCABULARY, make_folder, sampled
from torch import Tensor

from online_sao.algorithm import sao
from online_sao.config import LearnerSettings
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.head import ActionScores
from online_sao.learner.models import Compute
from online_sao.learner.policy import Policy

FP32 = {"dtype": "float32"}


def made(folder: Path, start: Path, **learner: Any) -> Policy:
    settings = LearnerSettings(**{**FP32, **learner})
    compute = Compute.chosen(settings)
    return Policy(compute.load(folder), compute.load_exact(folder), compute.load(start), settings)


def batch_of(folder: Path, count: int = 5) -> TrajectoryBatch:
    return TrajectoryBatch.from_trajectories(sampled(folder, count, temperature=0.7))


@torch.no_grad()
def moved(policy: Policy, first_layer: int = 0) -> None:
    """Push the policy's layers from `first_layer` up away from where they started."""
    for number, layer in enumerate(policy.decoder.layers):
        if number >= first_layer:
            for parameter in layer.parameters():
                parameter.mul_(1.1)


@torch.no_grad()
def by_hand(policy: Policy, start: Any, batch: TrajectoryBatch) -> tuple[Tensor, Tensor]:
    """log pi and KL(pi || start) of the action tokens, from two whole networks."""
    mask = batch.action_mask
    t = batch.temperatures[:, None, None]
    log_p = (policy.model(input_ids=batch.token_ids).logits / t).log_softmax(-1)[:, :-1]
    log_q = (start(input_ids=batch.token_ids).logits / t).log_softmax(-1)[:, :-1]
    taken = log_p.gather(2, batch.token_ids[:, 1:, None]).squeeze(2)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    return taken[mask[:, 1:]], kl[mask[:, 1:]]


@pytest.mark.parametrize("layers", [1, 2, 0])
def test_scores_equal_those_of_two_whole_networks(tmp_path: Path, layers: int) -> None:
    base = make_folder(tmp_path / "base")
    policy = made(base, base, policy_layers=layers)
    moved(policy, 0 if layers == 0 else 3 - layers)
    batch = batch_of(base)
    scores = policy.score(batch, None)
    logprobs, kl = by_hand(policy, Compute.chosen(LearnerSettings(**FP32)).load(base), batch)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.kl, kl, rtol=1e-4, atol=1e-5)
    assert float(kl.mean()) > 1e-3


@pytest.mark.parametrize(("layers", "shared"), [(1, 2), (2, 1), (3, None), (0, None)])
def test_all_layers_below_the_trained_ones_are_shared(
    tmp_path: Path, layers: int, shared: int | None
) -> None:
    base = make_folder(tmp_path / "base")
    policy = made(base, base, policy_layers=layers)
    assert policy.start is not None
    assert policy.start.shared == shared
    assert len(policy.start.layers) == 3 - (shared or 0)


def test_kl_to_itself_is_zero(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    scores = made(base, base, policy_layers=1).score(batch_of(base), None)
    assert scores.kl.abs().max() < 1e-6


def test_a_trunk_that_was_trained_before_is_not_taken_for_the_start_s(tmp_path: Path) -> None:
    """A policy once trained with more layers: only what is still equal may be shared."""
    base = make_folder(tmp_path / "base")
    policy = made(base, base, policy_layers=1)
    moved(policy, 1)
    policy.model.save_pretrained(tmp_path / "later")
    later = made(tmp_path / "later", base, policy_layers=1)
    assert later.start is not None
    assert later.start.shared == 1
    batch = batch_of(base)
    _, kl = by_hand(later, Compute.chosen(LearnerSettings(**FP32)).load(base), batch)
    torch.testing.assert_close(later.score(batch, None).kl, kl, rtol=1e-4, atol=1e-5)


def pull(scores: ActionScores, _: slice) -> Tensor:
    return -scores.logprobs.sum() + 0.3 * scores.kl.sum()


def gradients(policy: Policy) -> dict[str, Tensor]:
    found = {}
    for name, master in policy.weights.masters.items():
        assert master.grad is not None, name
        found[name] = master.grad.clone()
    return found


def test_frozen_layers_get_no_gradient_and_no_graph(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    policy = made(base, base, policy_layers=1)
    policy.score(batch_of(base), pull)
    assert set(gradients(policy)) == set(policy.weights.masters)
    for name, parameter in policy.model.named_parameters():
        assert (parameter.grad is not None) == (name in policy.weights.masters)


@pytest.mark.parametrize("layers", [1, 0])
def test_gradients_equal_plain_autograd_over_the_whole_network(tmp_path: Path, layers: int) -> None:
    base = make_folder(tmp_path / "base")
    batch, policy = batch_of(base), made(base, base, policy_layers=layers)
    moved(policy, 2)
    policy.score(batch, pull)
    got = gradients(policy)
    for parameter in policy.weights.masters.values():
        parameter.grad = None
    t, mask = batch.temperatures[:, None, None], batch.action_mask[:, 1:]
    log_p = (policy.model(input_ids=batch.token_ids).logits / t).log_softmax(-1)[:, :-1]
    start = Compute.chosen(LearnerSettings(**FP32)).load(base)
    log_q = (start(input_ids=batch.token_ids).logits / t).log_softmax(-1)[:, :-1]
    taken = log_p.gather(2, batch.token_ids[:, 1:, None]).squeeze(2)
    (-taken[mask].sum() + 0.3 * sao.kl_divergence(log_p, log_q)[mask].sum()).backward()
    want = gradients(policy)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)


def test_recomputed_activations_give_the_same_gradients(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", attention_dropout=0.1)
    batch = batch_of(base)
    plain = made(base, base, policy_layers=2)
    again = made(base, base, policy_layers=2, activation_checkpointing=True)
    plain.score(batch, pull)
    again.score(batch, pull)
    assert again.decoder.layers[1].gradient_checkpointing
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradients(again)[name], gradient)


def test_junk_behind_a_trajectory_s_end_changes_nothing(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    policy, batch = made(base, base, policy_layers=1), batch_of(base)
    clean = policy.score(batch, None)
    behind = torch.arange(batch.token_ids.shape[1])[None] >= batch.lengths[:, None]
    batch.token_ids[behind] = VOCABULARY - 1
    dirty = policy.score(batch, None)
    assert torch.equal(clean.logprobs, dirty.logprobs)
    assert torch.equal(clean.kl, dirty.kl)
