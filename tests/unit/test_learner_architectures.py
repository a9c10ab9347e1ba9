"""Critic and policy on every family that is promised: one life of each, then what it shows.

A life: three updates in fp32 with weight decay set on the critic's optimizer, an export.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_families import FAMILIES, SHAPE, family_folder, model_of, replies
from tiny_llama import VOCABULARY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.olmo import OlmoConfig

from online_sao.algorithm import sao
from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import ModelError
from online_sao.learner.batch import TrajectoryBatch
from online_sao.learner.head import ActionScores
from online_sao.learner.models import (
    Compute,
    CriticNetwork,
    Decoder,
    critic_parameters,
    load_causal_lm,
)
from online_sao.learner.policy import Policy
from online_sao.learner.trainer import SaoTrainer
from online_sao.manifest import Manifest
from online_sao.types import UpdateKind

CPU = torch.device("cpu")
ALL_LAYERS = {"policy_layers": 0, "critic_layers": 0, "dtype": "float32", "policy_lr": 1e-2}


# -- how many parameters, from the config ---------------------------------------------------------


def attention(c: Any, *, qkv: bool = False, out: bool = False, norms: bool = False) -> int:
    """One layer's projections; `qkv` and `out`: with biases; `norms`: one per head's q and k."""
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    weights = c.hidden_size * (q + kv + kv) + q * c.hidden_size
    return weights + qkv * (q + kv + kv) + out * c.hidden_size + norms * 2 * c.head_dim


def mlp(c: Any, width: int | None = None) -> int:
    """Gate, up and down."""
    return 3 * c.hidden_size * (width or c.intermediate_size)


def dense(**kind: bool) -> Callable[[Any, int], tuple[int, int]]:
    """(frozen, trained) of a layer with an MLP and two norms."""
    return lambda c, _: (attention(c, **kind), mlp(c) + 2 * c.hidden_size)


def sandwich(**kind: bool) -> Callable[[Any, int], tuple[int, int]]:
    """The same with norms before and after attention and MLP."""
    return lambda c, _: (attention(c, **kind), mlp(c) + 4 * c.hidden_size)


def qwen3_moe(c: Any, _: int) -> tuple[int, int]:
    router = c.num_experts * c.hidden_size
    experts = c.num_experts * mlp(c, c.moe_intermediate_size)
    return attention(c, norms=True) + router, experts + 2 * c.hidden_size


def glm4_moe(c: Any, layer: int) -> tuple[int, int]:
    """Dense below `first_k_dense_replace`; above, routed experts and shared ones."""
    frozen, norms = attention(c, norms=True), 2 * c.hidden_size
    if layer < c.first_k_dense_replace:
        return frozen, mlp(c) + norms
    routed = c.n_routed_experts * mlp(c, c.moe_intermediate_size)
    shared = mlp(c, c.n_shared_experts * c.moe_intermediate_size)
    return frozen + c.n_routed_experts * c.hidden_size, routed + shared + norms


def gpt_oss(c: Any, _: int) -> tuple[int, int]:
    """One sink a head; router and experts have biases."""
    h, ff, experts = c.hidden_size, c.intermediate_size, c.num_local_experts
    router = experts * (h + 1)
    frozen = attention(c, qkv=True, out=True) + c.num_attention_heads + router
    return frozen, experts * (h * 2 * ff + 2 * ff + ff * h + h) + 2 * h


def cohere(c: Any, _: int) -> tuple[int, int]:
    """Attention and MLP side by side behind one norm."""
    return attention(c), mlp(c) + c.hidden_size


LAYER: dict[str, Callable[[Any, int], tuple[int, int]]] = {
    "llama": dense(),
    "qwen2": dense(qkv=True),
    "qwen3": dense(norms=True),
    "qwen3_moe": qwen3_moe,
    "glm4": sandwich(qkv=True),
    "glm4_moe": glm4_moe,
    "gemma": dense(),
    "gemma2": sandwich(),
    "gemma3_text": sandwich(norms=True),
    "gpt_oss": gpt_oss,
    "granite": dense(),
    "cohere": cohere,
}


def counted(family: str) -> tuple[int, int]:
    """(frozen, trained) of the whole critic: also the embeddings; the final norm, the head."""
    c = FAMILIES[family]
    layers = [LAYER[family](c, n) for n in range(c.num_hidden_layers)]
    frozen = c.vocab_size * c.hidden_size + sum(f for f, _ in layers)
    return frozen, sum(t for _, t in layers) + c.hidden_size + c.hidden_size + 1


# -- one life of each -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Life:
    """What is left of one."""

    base: Path
    version: Path
    trainer: SaoTrainer
    critic_before: dict[str, Tensor]
    kinds: list[UpdateKind]

    @property
    def policy(self) -> Policy:
        return self.trainer._policy

    @property
    def critic(self) -> CriticNetwork:
        return self.trainer._critic.network


def live(family: str, folder: Path, stored: torch.dtype, **learner: Any) -> Life:
    base = family_folder(folder / "base", family, stored)
    settings = LearnerSettings(**{**ALL_LAYERS, "critic_lr": 1e-2, **learner})
    trainer = SaoTrainer(AlgorithmSettings(kl_coef=0.1), settings, base)
    trainer.restore(base, None)
    for group in trainer._critic.weights.optimizer.param_groups:
        group["weight_decay"] = 0.1
    before = {n: p.clone() for n, p in trainer._critic.network.named_parameters()}
    batch = replies(base, 4)
    kinds = [trainer.update(batch, critic_only=False).kind for _ in range(3)]
    trainer.export_policy(folder / "v1")
    return Life(base, folder / "v1", trainer, before, kinds)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def life(family: str, tmp_path_factory: pytest.TempPathFactory) -> Life:
    return live(family, tmp_path_factory.mktemp(family), torch.float32)


def test_the_critic_trains_and_freezes_as_many_parameters_as_the_config_says(
    family: str, life: Life
) -> None:
    trained = critic_parameters(life.critic)
    every = dict(life.critic.named_parameters())
    frozen_count = sum(p.numel() for n, p in every.items() if n not in trained)
    assert (frozen_count, sum(p.numel() for p in trained.values())) == counted(family)
    assert trained.keys() == life.trainer._critic.weights.masters.keys()
    words = (".self_attn.", "embed_tokens", ".gate.", ".router.", "sinks")
    assert {n for n in every if any(w in n for w in words)} == every.keys() - trained.keys()


def test_weight_decay_reaches_nothing_frozen_and_all_that_trains_moves(life: Life) -> None:
    trained = critic_parameters(life.critic)
    assert life.trainer._critic.weights.steps() == 6
    for name, parameter in life.critic.named_parameters():
        assert torch.equal(parameter, life.critic_before[name]) != (name in trained), name


def test_the_version_has_the_base_s_names_dtypes_and_shapes_and_other_numbers(life: Life) -> None:
    assert life.kinds == [UpdateKind.POLICY] * 3
    assert dict(Manifest.read(life.version).tensors) == dict(Manifest.read(life.base).tensors)
    before, after = (load_file(f / "model.safetensors") for f in (life.base, life.version))
    still = {name for name in before if torch.equal(before[name], after[name])}
    # Not a parameter: GLM-4-MoE balances its experts' load with it in pretraining.
    assert still == {name for name in before if name.endswith("e_score_correction_bias")}


def test_the_version_loads_whole_and_is_the_trained_policy(family: str, life: Life) -> None:
    loaded, info = AutoModelForCausalLM.from_pretrained(
        life.version, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]
    tied = FAMILIES[family].tie_word_embeddings
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in load_file(life.version / "model.safetensors")) != tied
    ids = torch.randint(0, VOCABULARY, (2, 12))
    with torch.no_grad():
        ours = life.policy.model(input_ids=ids).logits.log_softmax(-1)
        theirs = loaded(input_ids=ids).logits.log_softmax(-1)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("wide", ["glm4_moe", "gpt_oss", "qwen3_moe", "gemma2"])
def test_bf16_checkpoints_keep_their_dtypes(wide: str, tmp_path: Path) -> None:
    lived = live(wide, tmp_path, torch.bfloat16, dtype="bfloat16", policy_layers=1)
    tensors = Manifest.read(lived.version).tensors
    assert dict(tensors) == dict(Manifest.read(lived.base).tensors)
    wider = {name for name, (dtype, _) in tensors.items() if dtype == "F32"}
    assert wider == {name for name in tensors if name.endswith("e_score_correction_bias")}
    before, after = (load_file(f / "model.safetensors") for f in (lived.base, lived.version))
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith(("model.layers.2.", "model.norm.")) for name in moved)


# -- the policy's scores --------------------------------------------------------------------------


def pull(scores: ActionScores, _: slice) -> Tensor:
    return -scores.logprobs.sum() + 0.3 * scores.kl.sum()


def moved_policy(base: Path, layers: int) -> Policy:
    """The policy pushed away from its start in the layers that train."""
    settings = LearnerSettings(dtype="float32", policy_layers=layers)
    compute = Compute.chosen(settings)
    policy = Policy(compute.load(base), None, compute.load(base), settings)
    with torch.no_grad():
        for master in policy.weights.masters.values():
            master.add_(torch.randn_like(master), alpha=0.1)
    return policy


def test_scores_and_gradients_are_those_of_two_whole_networks(life: Life) -> None:
    """Trunk shared, layers replayed under their own masks, logits changed after the head."""
    torch.manual_seed(1)
    policy = moved_policy(life.base, 2)
    start = load_causal_lm(life.base, torch.float32, CPU, "eager")
    batch = TrajectoryBatch.from_trajectories(replies(life.base, 5))
    assert policy.start is not None
    assert policy.start.shared == 1
    scores = policy.score(batch, pull)
    got = {n: p.grad.clone() for n, p in policy.weights.masters.items() if p.grad is not None}
    for parameter in policy.weights.masters.values():
        parameter.grad = None

    mask, ids = batch.action_mask[:, 1:], batch.token_ids
    log_p = policy.model(input_ids=ids).logits.log_softmax(-1)[:, :-1][mask]
    log_q = start(input_ids=ids).logits.log_softmax(-1)[:, :-1][mask]
    taken = log_p.gather(1, ids[:, 1:][mask][:, None]).squeeze(1)
    kl = sao.kl_divergence(log_p, log_q)
    torch.testing.assert_close(scores.logprobs, taken, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.kl, kl, rtol=1e-4, atol=1e-5)
    assert kl.mean() > 1e-3
    (-taken.sum() + 0.3 * kl.sum()).backward()
    want = {n: p.grad for n, p in policy.weights.masters.items() if p.grad is not None}
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-3, atol=1e-4)


def test_the_start_policy_s_hidden_states_are_the_whole_start_model_s(life: Life) -> None:
    policy = moved_policy(life.base, 1)
    start = load_causal_lm(life.base, torch.float32, CPU, "eager")
    ids = torch.randint(3, VOCABULARY, (3, 14))
    assert policy.start is not None
    assert policy.start.shared == 2
    with torch.no_grad(), policy._recorded() as calls:
        mine = policy.decoder.base(input_ids=ids, use_cache=False).last_hidden_state
    want = start.base_model(input_ids=ids, use_cache=False).last_hidden_state
    torch.testing.assert_close(policy.start.hidden(ids, calls), want)
    assert not torch.allclose(mine, want, atol=1e-2)


def test_what_stands_behind_a_trajectory_changes_nothing(life: Life) -> None:
    """No mask hides padding: causal attention never looks there, and experts drop no token."""
    batch = TrajectoryBatch.from_trajectories(replies(life.base, 5))
    behind = torch.arange(batch.token_ids.shape[1])[None] >= batch.lengths[:, None]
    assert behind.any()
    clean, values = life.policy.score(batch, None), life.trainer._critic.values(batch)
    batch.token_ids[behind] = VOCABULARY - 1
    dirty, again = life.policy.score(batch, None), life.trainer._critic.values(batch)
    torch.testing.assert_close(clean.logprobs, dirty.logprobs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(clean.kl, dirty.kl, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(values, again, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("moe", ["qwen3_moe", "gpt_oss"])
def test_a_router_s_auxiliary_loss_is_no_part_of_an_update(moe: str, tmp_path: Path) -> None:
    """Whatever the checkpoint's config asks of it: the versions are equal to the byte."""
    hashes = set()
    for asked in (False, True):
        base = family_folder(tmp_path / str(asked), moe)
        config = json.loads((base / "config.json").read_text())
        said = {**config, "output_router_logits": asked, "router_aux_loss_coef": 5.0}
        (base / "config.json").write_text(json.dumps(said))
        trainer = SaoTrainer(AlgorithmSettings(), LearnerSettings(**ALL_LAYERS), base)
        trainer.restore(base, None)
        trainer.update(replies(base, 4), critic_only=False)
        trainer.export_policy(tmp_path / f"v-{asked}")
        hashes.add(Manifest.read(tmp_path / f"v-{asked}").sha256)
    assert len(hashes) == 1
    assert hashes != {Manifest.read(base).sha256}


# -- what cannot be named is refused --------------------------------------------------------------


@pytest.mark.parametrize(
    ("family_", "module", "message"),
    [
        ("llama", "self_attn", "attention cannot be named"),
        ("qwen3_moe", "mlp.gate", "router cannot be named"),
        ("gpt_oss", "mlp.router", "router cannot be named"),
    ],
)
def test_attention_or_a_router_under_another_name_is_an_error(
    family_: str, module: str, message: str
) -> None:
    model = model_of(family_)
    critic = CriticNetwork(model, Decoder.of(model), 0)
    for layer in critic.layers:
        path, _, name = module.rpartition(".")
        owner = layer.get_submodule(path)
        setattr(owner, "mixer", getattr(owner, name))  # noqa: B010 - a name for each case
        delattr(owner, name)
    with pytest.raises(ModelError, match=message):
        critic_parameters(critic)


@pytest.mark.parametrize("family_", ["gemma2", "granite", "cohere", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_changed_in_a_way_the_config_does_not_say_are_refused(
    family_: str, dtype: torch.dtype
) -> None:
    model = model_of(family_).to(dtype)
    Decoder.of(model)

    class Sharper(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits.clamp(max=30.0) if family_ == "llama" else out.logits * 1.1
            return out

    model.__class__ = Sharper
    with pytest.raises(ModelError, match="changes its logits"):
        Decoder.of(model)


def test_hidden_states_changed_before_the_head_are_refused() -> None:
    model = model_of("llama")
    model.lm_head.register_forward_pre_hook(lambda _, args: (args[0] * 1.1,))
    # A hook of ours sees what the head reads, so a factor before it shows.
    with pytest.raises(ModelError, match="hidden states"):
        Decoder.of(model)


@pytest.mark.parametrize("family_", ["gemma2", "gpt_oss", "llama"])
def test_families_without_sdpa_attend_eagerly(family_: str, tmp_path: Path) -> None:
    """Soft caps and sinks: sdpa has neither, and is what a GPU would be given."""
    base = family_folder(tmp_path / "m", family_)
    model = load_causal_lm(base, torch.float32, CPU, "sdpa")
    assert model.config._attn_implementation == ("sdpa" if family_ == "llama" else "eager")


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    model_of("gpt_oss").save_pretrained(tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    said = {**json.loads(config.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(said))
    with pytest.raises(ModelError, match="is quantized"):
        load_causal_lm(tmp_path / "m", torch.float32, CPU, "eager")


def test_norms_without_parameters_are_no_hindrance() -> None:
    """OLMo's: then the critic trains its MLPs and its head alone."""
    config = OlmoConfig(**{k: v for k, v in SHAPE.items() if k != "head_dim"})
    model = AutoModelForCausalLM.from_config(config).eval()
    trained = critic_parameters(CriticNetwork(model, Decoder.of(model), 0))
    assert sum(p.numel() for p in trained.values()) == 3 * mlp(config) + config.hidden_size + 1


def test_a_model_without_named_layers_is_refused() -> None:
    model = model_of("llama")
    model.model.blocks = nn.ModuleList(model.model.layers)
    del model.model.layers
    model.config.num_hidden_layers = 7
    with pytest.raises(ModelError, match="layers and final norm cannot be named"):
        Decoder.of(model)
