"""fp32 masters under bf16 copies: they move, they are restored to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from online_sao.errors import ModelError, UpdateNotFinite
from online_sao.learner.weights import TrainedWeights


def made(
    dtype: torch.dtype = torch.bfloat16, lr: float = 1e-6, **more: float
) -> tuple[dict[str, nn.Parameter], TrainedWeights]:
    torch.manual_seed(0)
    parameters = {
        "a": nn.Parameter(torch.ones(4, 3, dtype=dtype)),
        "b": nn.Parameter(torch.randn(5, dtype=dtype)),
    }
    return parameters, TrainedWeights(
        parameters, lr=lr, adam_eps=1e-8, grad_clip=more.get("grad_clip", 1e9)
    )


def pull(parameters: dict[str, nn.Parameter], weights: TrainedWeights, by: float = 1.0) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, by)
    weights.accumulate()


def bits(weights: TrainedWeights) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights.state().items()}


def test_steps_too_small_for_bf16_add_up_in_the_masters() -> None:
    parameters, weights = made(lr=1e-4)
    for _ in range(50):
        pull(parameters, weights)
        weights.step()
    # bf16 next to 1 has steps of 2^-8 = 0.0039: one step of 1e-4 is lost, fifty are not.
    assert weights.masters["a"][0, 0].item() == pytest.approx(1.0 - 50 * 1e-4, abs=1e-5)
    assert parameters["a"][0, 0].item() < 1.0


def test_what_no_loss_reaches_stays_and_has_a_whole_state_all_the_same() -> None:
    parameters, weights = made(torch.float32)
    before = parameters["b"].detach().clone()
    parameters["a"].grad = torch.ones(4, 3)
    weights.step()
    assert torch.equal(parameters["b"], before)
    _, other = made(torch.float32)
    other.load_state(bits(weights), weights.steps())
    assert other.steps() == 1
    assert not other.state()["exp_avg.b"].any()


def test_micro_batches_add_up_in_fp32() -> None:
    parameters, weights = made()
    for by in (256.0, 1.0, 1.0):  # 257 and 258 are no bf16 numbers: 256 + 1 stays 256 there
        pull(parameters, weights, by)
    grad = weights.masters["a"].grad
    assert grad is not None
    assert grad.unique().tolist() == [258.0]
    assert parameters["a"].grad is None


def test_in_fp32_master_and_copy_are_one_tensor() -> None:
    parameters, weights = made(torch.float32)
    assert weights.masters["a"] is parameters["a"]
    pull(parameters, weights)
    assert weights.clip() == pytest.approx(17**0.5)  # 12 + 5 ones


def test_exact_values_beat_the_rounded_copies() -> None:
    exact = {"a": torch.full((4, 3), 1.001)}
    copy = {"a": nn.Parameter(exact["a"].bfloat16())}
    weights = TrainedWeights(copy, lr=1e-6, adam_eps=1e-8, grad_clip=1.0, exact=exact)
    assert weights.masters["a"][0, 0].item() == pytest.approx(1.001, abs=1e-7)


def test_the_norm_is_clipped_and_reported_as_it_was() -> None:
    parameters, weights = made(torch.float32, grad_clip=1.0)
    pull(parameters, weights)
    assert weights.clip() == pytest.approx(17**0.5)
    assert weights.clip() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused(bad: float) -> None:
    parameters, weights = made()
    pull(parameters, weights, bad)
    with pytest.raises(UpdateNotFinite):
        weights.clip()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_block_that_raises_leaves_every_bit_as_it_was(
    dtype: torch.dtype, steps_before: int
) -> None:
    parameters, weights = made(dtype, lr=0.1)
    for _ in range(steps_before):
        pull(parameters, weights)
        weights.step()
    before, copies = bits(weights), {n: p.detach().clone() for n, p in parameters.items()}

    def fail() -> None:
        with weights.undone_on_error():
            pull(parameters, weights)
            weights.step()
            pull(parameters, weights)
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        fail()
    after = bits(weights)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(parameters[name], copies[name]) for name in copies)
    assert weights.steps() == steps_before
    assert all(p.grad is None for p in (*parameters.values(), *weights.masters.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_saved_and_loaded_goes_on_to_the_bit(dtype: torch.dtype) -> None:
    parameters, weights = made(dtype, lr=0.01)
    pull(parameters, weights, 0.5)
    weights.step()
    saved, steps = bits(weights), weights.steps()
    pull(parameters, weights, -0.3)
    weights.step()
    others, fresh = made(dtype, lr=0.01)
    fresh.load_state(saved, steps)
    pull(others, fresh, -0.3)
    fresh.step()
    assert all(torch.equal(bits(fresh)[n], t) for n, t in bits(weights).items())
    assert all(torch.equal(others[n], parameters[n]) for n in parameters)


def test_moments_alone_leave_the_masters() -> None:
    parameters, weights = made(torch.float32, lr=0.01)
    pull(parameters, weights)
    weights.step()
    _, fresh = made(torch.float32, lr=0.01)
    fresh.load_state(bits(weights), 1, masters=False)
    assert fresh.masters["a"].unique().tolist() == [1.0]
    assert fresh.steps() == 1


def test_a_state_of_other_parameters_is_refused_and_changes_nothing() -> None:
    parameters, weights = made()
    pull(parameters, weights)
    weights.step()
    before = bits(weights)
    foreign = {name: tensor for name, tensor in before.items() if not name.endswith(".b")}
    with pytest.raises(ModelError, match="other trained parameters"):
        weights.load_state(foreign, 1)
    assert all(torch.equal(bits(weights)[n], t) for n, t in before.items())


def test_no_weight_decay_moves_what_has_no_gradient() -> None:
    parameters, weights = made(torch.float32, lr=0.1)
    pull(parameters, weights, 0.0)
    weights.step()
    assert parameters["a"].unique().tolist() == [1.0]
