"""Adapters: what trains, what is served, and that the base is the start policy."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES, family_folder, model_of, replies
from tiny_llama import VOCABULARY, make_folder, rescored, sampled, write_manifest
from torch import Tensor
from transformers import AutoModelForCausalLM

from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.engines.embedded.weights import read_tensors
from online_sao.errors import ModelError
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.checkpoints import VersionFolders
from online_sao.learner.export import SavedState
from online_sao.learner.head import ActionScores
from online_sao.learner.lora import ADAPTER_FOLDER, WEIGHTS_FILE
from online_sao.learner.models import Compute
from online_sao.learner.policy import Policy
from online_sao.learner.trainer import SaoTrainer
from online_sao.manifest import Manifest
from online_sao.types import Trajectory, UpdateKind

R = 4
LORA: dict[str, Any] = {
    "lora_rank": R, "policy_layers": 2, "critic_layers": 1, "dtype": "float32", "policy_lr": 1e-2,
    "critic_lr": 1e-2,
}  # fmt: skip
PER_LAYER = R * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
"""The tiny Llama's q and o (32 x 32), k and v (16 x 32), gate, up and down (32 and 48)."""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "base")


def made(start: Path, folder: Path | None = None, **learner: Any) -> SaoTrainer:
    settings = LearnerSettings(**{**LORA, **learner})
    trainer = SaoTrainer(AlgorithmSettings(kl_coef=0.2), settings, start)
    trainer.restore(folder or start, None)
    return trainer


def updated(trainer: SaoTrainer, start: Path, times: int = 2) -> SaoTrainer:
    batch = sampled(start, 6)
    for _ in range(times):
        assert trainer.update(batch, critic_only=False).kind is UpdateKind.POLICY
    return trainer


def masters(trainer: SaoTrainer) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainer._policy.weights.masters.items()}


@pytest.mark.parametrize(("layers", "adapted"), [(1, 1), (2, 2), (0, 3), (9, 3)])
def test_rank_times_in_plus_out_of_every_linear_layer_trains(
    base: Path, layers: int, adapted: int
) -> None:
    weights = made(base, policy_layers=layers)._policy.weights
    assert sum(p.numel() for p in weights.masters.values()) == adapted * PER_LAYER
    assert all(".lora_A." in name or ".lora_B." in name for name in weights.masters)


def test_the_base_keeps_its_bits_and_the_adapters_move(base: Path) -> None:
    trainer = made(base)
    before = {n: p.clone() for n, p in trainer._policy.model.named_parameters()}
    updated(trainer, base)
    for name, parameter in trainer._policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) != ("lora_" in name), name


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "gpt_oss"])
def test_in_a_mixture_of_experts_attention_alone_gets_adapters(family: str) -> None:
    """Neither GLM's shared experts nor its dense first layer: see the module's docstring."""
    policy = Policy(model_of(family), None, None, LearnerSettings(**{**LORA, "policy_layers": 0}))
    assert policy.adapter is not None
    assert set(policy.adapter.layers) == {
        f"model.layers.{n}.self_attn.{x}_proj" for n in range(3) for x in "qkvo"
    }
    # q, o: 16 x 16; k, v: 8 x 16.
    count = sum(p.numel() for p in policy.weights.masters.values())
    assert count == 3 * R * (2 * (16 + 16) + 2 * (16 + 8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_at_the_start_kl_is_exactly_0(base: Path, dtype: str) -> None:
    policy = made(base, dtype=dtype)._policy
    scores = policy.score(TrajectoryBatch.from_trajectories(sampled(base, 6)), None)
    assert scores.kl.tolist() == [0.0] * len(scores.kl)


def pull(scores: ActionScores, _: slice) -> Tensor:
    return -scores.logprobs.sum() + 0.3 * scores.kl.sum()


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "glm4_moe"])
@pytest.mark.parametrize("layers", [1, 0])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_scores_and_gradients_are_those_of_the_adapted_model_and_a_separate_base(
    tmp_path: Path, family: str, layers: int, checkpointing: bool
) -> None:
    folder = family_folder(tmp_path / "base", family)
    settings = LearnerSettings(
        **{**LORA, "policy_layers": layers, "activation_checkpointing": checkpointing}
    )
    compute = Compute.chosen(settings)
    model = compute.load(folder)
    policy, apart = Policy(model, None, model, settings), compute.load(folder)
    torch.manual_seed(0)
    with torch.no_grad():
        for master in policy.weights.masters.values():
            master.add_(torch.randn_like(master), alpha=0.1)
    batch = TrajectoryBatch.from_trajectories(replies(folder, 5))
    scores = policy.score(batch, pull)
    got = {n: p.grad.clone() for n, p in policy.weights.masters.items() if p.grad is not None}
    for master in policy.weights.masters.values():
        master.grad = None

    mask, ids = batch.action_mask[:, 1:], batch.token_ids
    log_p = model(input_ids=ids).logits.log_softmax(-1)[:, :-1][mask]
    log_q = apart(input_ids=ids).logits.log_softmax(-1)[:, :-1][mask]
    taken = log_p.gather(1, ids[:, 1:][mask][:, None]).squeeze(1)
    kl = (log_p.exp() * (log_p - log_q)).sum(1)
    torch.testing.assert_close(scores.logprobs, taken, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.kl, kl, rtol=1e-4, atol=1e-5)
    assert kl.mean() > 1e-3
    (-taken.sum() + 0.3 * kl.sum()).backward()
    assert got.keys() == policy.weights.masters.keys()
    for name, master in policy.weights.masters.items():
        assert master.grad is not None
        torch.testing.assert_close(got[name], master.grad, rtol=1e-3, atol=1e-4)


def test_after_updates_kl_is_that_to_a_separate_copy_of_the_base(base: Path) -> None:
    trainer = updated(made(base), base, 4)
    batch = TrajectoryBatch.from_trajectories(sampled(base, 6))
    got = trainer._policy.score(batch, None).kl
    apart = Compute.chosen(LearnerSettings(**LORA)).load(base)
    with torch.no_grad():
        log_p = trainer._policy.model(input_ids=batch.token_ids).logits.log_softmax(-1)[:, :-1]
        log_q = apart(input_ids=batch.token_ids).logits.log_softmax(-1)[:, :-1]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)[batch.action_mask[:, 1:]]
    torch.testing.assert_close(got, kl, rtol=1e-4, atol=1e-6)
    assert got.mean() > 1e-3


def test_there_is_no_second_network(base: Path) -> None:
    policy = made(base)._policy
    assert policy.start is not None
    ours = {p.data_ptr() for p in policy.model.parameters()}
    assert {p.data_ptr() for p in policy.start.layers.parameters()} <= ours
    assert policy.start.base is None


# -- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_version_holds_merged_weights_under_the_base_s_names(tmp_path: Path, family: str) -> None:
    folder = family_folder(tmp_path / "base", family)
    trainer, batch = made(folder), replies(folder, 4)
    for _ in range(2):
        trainer.update(batch, critic_only=False)
    trainer.export_policy(tmp_path / "v1")
    assert dict(Manifest.read(tmp_path / "v1").tensors) == dict(Manifest.read(folder).tensors)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "v1", attn_implementation="eager", output_loading_info=True
    )
    assert not [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    ids = torch.randint(3, VOCABULARY, (2, 12))
    with torch.no_grad():
        ours = trainer._policy.model(input_ids=ids).logits
        theirs = loaded(input_ids=ids).logits
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_merging_is_one_fp32_sum_rounded_once(
    tmp_path: Path, stored: torch.dtype, compute: str
) -> None:
    base = make_folder(tmp_path / "base", stored)
    trainer = updated(made(base, dtype=compute, lora_alpha=6), base)
    trainer.export_policy(tmp_path / "v1")
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "v1"))
    adapter, seen, wide = masters(trainer), set(), stored == torch.float32
    for name in before:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in adapter:
            assert torch.equal(after[name], before[name]), name
            continue
        b, a = adapter[f"{module}.lora_B.weight"], adapter[f"{module}.lora_A.weight"]
        want = (before[name].float() + 6 / R * (b @ a)).to(stored)
        torch.testing.assert_close(after[name], want, rtol=0, atol=1e-6 if wide else 0)
        assert not torch.equal(after[name], before[name])
        seen.add(name.split(".")[-2])
    assert seen == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.filterwarnings(
    # PeftModel (not what we use of PEFT) asks transformers under a name that is going away.
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
@pytest.mark.parametrize("family", ["llama", "gemma2", "glm4_moe", "gpt_oss"])
def test_the_adapter_s_folder_is_peft_s_own(tmp_path: Path, family: str) -> None:
    base = family_folder(tmp_path / "base", family)
    trainer = made(base)
    trainer.update(replies(base, 4), critic_only=False)
    trainer.export_policy(tmp_path / "v1")
    folder = tmp_path / "v1" / ADAPTER_FOLDER
    said = json.loads((folder / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"], said["peft_type"]) == (R, 2 * R, "LORA")
    plain = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager").eval()
    peer = PeftModel.from_pretrained(plain, folder)
    ids = torch.randint(3, VOCABULARY, (2, 12))
    with torch.no_grad():
        ours, theirs = trainer._policy.model(input_ids=ids).logits, peer(input_ids=ids).logits
        with peer.disable_adapter():
            assert not torch.allclose(peer(input_ids=ids).logits, ours, atol=1e-3)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


def test_a_version_with_an_adapter_is_published_verified_and_removed_whole(
    base: Path, tmp_path: Path
) -> None:
    versions = VersionFolders(tmp_path / "versions")
    version = versions.write(updated(made(base), base).export_policy, 0)
    folder = Path(version.path)
    Manifest.read(folder).verify(folder)
    assert (folder / ADAPTER_FOLDER / WEIGHTS_FILE).is_file()
    assert set(Manifest.read(folder).files) == {"model.safetensors"}
    read, sha256 = read_tensors(folder, Manifest.read(folder))  # as the engine does
    assert read.keys() == Manifest.read(base).tensors.keys()
    assert sha256 == version.sha256
    versions.remove(version)
    assert list((tmp_path / "versions").iterdir()) == []


@torch.no_grad()
def chance_of_9(folder: Path, prompts: list[Trajectory]) -> float:
    """Mean probability of the token 9 right after the prompts, as the folder is served."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for t in prompts:
        prompt = t.token_ids[: t.action_mask.index(True)]
        found.append(float(model(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)[9]))
    return sum(found) / len(found)


def test_rewarding_one_token_raises_its_probability_as_served_in_bf16(tmp_path: Path) -> None:
    """What bf16 rounding of the merged weights leaves of the adapters is what users meet."""
    base = make_folder(tmp_path / "base", torch.bfloat16)
    settings = LearnerSettings(**{**LORA, "dtype": "bfloat16", "policy_lr": 3e-2})
    trainer = SaoTrainer(AlgorithmSettings(kl_coef=0.0), settings, base)
    trainer.restore(base, None)
    prompts, newest = sampled(base, 16), base
    for version in range(1, 9):
        dice, batch = random.Random(version), []
        for t in prompts:
            ids, first, hit = list(t.token_ids), t.action_mask.index(True), dice.random() < 0.5
            ids[first] = 9 if hit else dice.randrange(10, VOCABULARY)
            batch.append(replace(t, token_ids=tuple(ids), reward=float(hit)))
        trainer.update(rescored(newest, batch), critic_only=False)
        newest = tmp_path / f"v{version}"
        trainer.export_policy(newest)
    assert chance_of_9(newest, prompts) > 2 * chance_of_9(base, prompts)


# -- going on -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resuming_equals_never_having_stopped(base: Path, tmp_path: Path, dtype: str) -> None:
    trainer, batch = updated(made(base, dtype=dtype), base), sampled(base, 6, seed=1)
    trainer.export_policy(tmp_path / "v1")
    trainer.save_state(tmp_path / "s1")
    other = SaoTrainer(
        AlgorithmSettings(kl_coef=0.2), LearnerSettings(**{**LORA, "dtype": dtype}), base
    )
    assert other.restore(tmp_path / "v1", tmp_path / "s1") == ""
    results = [t.update(batch, critic_only=False) for t in (trainer, other)]
    assert results[0].traces == results[1].traces
    for number, t in enumerate((trainer, other)):
        t.export_policy(tmp_path / f"v2-{number}")
    hashes = {Manifest.read(tmp_path / f"v2-{n}").sha256 for n in (0, 1)}
    assert len(hashes) == 1
    assert all(torch.equal(masters(other)[n], t) for n, t in masters(trainer).items())


def test_without_its_state_the_adapter_comes_from_the_version_s_folder(
    base: Path, tmp_path: Path
) -> None:
    trainer = updated(made(base), base)
    trainer.save_state(tmp_path / "s1")
    updated(trainer, base, 1).export_policy(tmp_path / "v2")
    want = masters(trainer)
    stateless = made(base, tmp_path / "v2")
    assert all(torch.equal(masters(stateless)[n], t) for n, t in want.items())
    older = SaoTrainer(AlgorithmSettings(kl_coef=0.2), LearnerSettings(**LORA), base)
    note = older.restore(tmp_path / "v2", tmp_path / "s1")
    assert "policy weights from v2" in note
    assert all(torch.equal(masters(older)[n], t) for n, t in want.items())
    assert older._policy.weights.steps() == SavedState.read(tmp_path / "s1").policy_steps == 2
    older.export_policy(tmp_path / "again")
    assert Manifest.read(tmp_path / "again").sha256 == Manifest.read(tmp_path / "v2").sha256


def test_fresh_adapters_are_the_same_every_time_and_leave_the_dice_alone(base: Path) -> None:
    torch.manual_seed(5)
    first = masters(made(base))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    second = masters(made(base))
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert all(bool(t.any()) == ("lora_A" in n) for n, t in first.items())


def test_switched_off_the_merged_weights_are_trained_on(base: Path, tmp_path: Path) -> None:
    trainer = updated(made(base), base)
    trainer.export_policy(tmp_path / "v1")
    trainer.save_state(tmp_path / "s1")
    plain = SaoTrainer(
        AlgorithmSettings(kl_coef=0.2), LearnerSettings(**{**LORA, "lora_rank": 0}), base
    )
    note = plain.restore(tmp_path / "v1", tmp_path / "s1")
    assert "the policy's optimizer starts afresh: the saved state belongs to other" in note
    plain.export_policy(tmp_path / "same")
    assert Manifest.read(tmp_path / "same").sha256 == Manifest.read(tmp_path / "v1").sha256
    assert not (tmp_path / "same" / ADAPTER_FOLDER).exists()
    updated(plain, base, 1)


def test_switched_on_over_a_version_trained_without_is_an_error(base: Path, tmp_path: Path) -> None:
    plain = updated(made(base, lora_rank=0), base)
    plain.export_policy(tmp_path / "v1")
    with pytest.raises(ModelError, match="was trained without adapters"):
        made(base, tmp_path / "v1")


def test_switched_on_before_the_first_version_begins_at_the_base(
    base: Path, tmp_path: Path
) -> None:
    plain = made(base, lora_rank=0)
    plain.update(sampled(base, 4), critic_only=True)
    plain.save_state(tmp_path / "s1")
    trainer = SaoTrainer(AlgorithmSettings(kl_coef=0.2), LearnerSettings(**LORA), base)
    assert "optimizer starts afresh" in trainer.restore(base, tmp_path / "s1")
    assert trainer._critic.weights.steps() == 2
    updated(trainer, base)


@pytest.mark.parametrize(
    "other", [{"lora_rank": 8}, {"lora_alpha": 5}, {"policy_layers": 1}], ids=str
)
def test_another_rank_scale_or_depth_is_an_error_that_says_both(
    base: Path, tmp_path: Path, other: dict[str, int]
) -> None:
    updated(made(base), base).export_policy(tmp_path / "v1")
    with pytest.raises(ModelError, match=r"rank 4, alpha 8 and 14 adapters; the settings say"):
        made(base, tmp_path / "v1", **other)


def test_an_adapter_that_is_not_the_one_served_is_an_error(base: Path, tmp_path: Path) -> None:
    trainer = updated(made(base), base)
    trainer.export_policy(tmp_path / "v1")
    updated(trainer, base, 3).export_policy(tmp_path / "v2")
    shutil.rmtree(tmp_path / "v1" / ADAPTER_FOLDER)
    shutil.copytree(tmp_path / "v2" / ADAPTER_FOLDER, tmp_path / "v1" / ADAPTER_FOLDER)
    with pytest.raises(ModelError, match="its adapter and its merged"):
        made(base, tmp_path / "v1")


def test_a_broken_adapter_is_an_error(base: Path, tmp_path: Path) -> None:
    updated(made(base), base).export_policy(tmp_path / "v1")
    file = tmp_path / "v1" / ADAPTER_FOLDER / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="is no adapter"):
        made(base, tmp_path / "v1")


@pytest.mark.parametrize("change", ["one too few", "one too large"])
def test_an_adapter_with_other_tensors_is_an_error(base: Path, tmp_path: Path, change: str) -> None:
    updated(made(base), base).export_policy(tmp_path / "v1")
    file = tmp_path / "v1" / ADAPTER_FOLDER / WEIGHTS_FILE
    tensors = load_file(file)
    name = min(tensors)
    tensors[name] = torch.zeros(9, 9)
    if change == "one too few":
        del tensors[name]
    save_file(tensors, file)
    with pytest.raises(ModelError, match="other trained parameters"):
        made(base, tmp_path / "v1")


def test_linear_weights_stored_under_another_name_are_an_error(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(renamed, base / "model.safetensors", metadata={"format": "pt"})
    write_manifest(base)
    with pytest.raises(ModelError, match="under another name"):
        made(base)


def test_more_adapters_than_peft_writes_out_by_name_are_read_back(tmp_path: Path) -> None:
    """28 of them: from 20 on PEFT's config would name them by their endings alone."""
    start = make_folder(tmp_path / "base", num_hidden_layers=4)
    trainer = updated(made(start, policy_layers=0), start)
    assert trainer._policy.adapter is not None
    assert len(trainer._policy.adapter.layers) == 28
    trainer.export_policy(tmp_path / "v1")
    again = made(start, tmp_path / "v1", policy_layers=0)
    for name, master in masters(trainer).items():
        assert torch.equal(masters(again)[name], master)
