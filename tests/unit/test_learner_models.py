"""What is loaded, what trains and what is frozen, on every family the critic is promised for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import make_folder
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma import GemmaConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.glm4 import Glm4Config
from transformers.models.glm4_moe import Glm4MoeConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from online_sao.config import LearnerSettings
from online_sao.errors import ModelError
from online_sao.learner.models import (
    Compute,
    CriticNetwork,
    Decoder,
    critic_parameters,
    pick_attention,
    pick_dtype,
    policy_parameters,
)

H, FF, LAYERS, V = 16, 24, 2, 40
DENSE: dict[str, Any] = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": FF, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {**DENSE, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
MLP = 3 * H * FF
EXPERTS = 4 * 3 * H * 8
OUTSIDE = H + H + 1  # the final norm, the head and its bias

# Per family: config, and the critic's trained parameters worked out by hand.
FAMILIES: dict[str, tuple[Any, int]] = {
    "llama": (LlamaConfig(**DENSE), LAYERS * (MLP + 2 * H) + OUTSIDE),
    "qwen2": (Qwen2Config(**DENSE), LAYERS * (MLP + 2 * H) + OUTSIDE),
    # Its norms inside attention (q_norm, k_norm) are frozen with it.
    "qwen3": (Qwen3Config(**DENSE), LAYERS * (MLP + 2 * H) + OUTSIDE),
    "qwen3_moe": (
        Qwen3MoeConfig(**MOE, num_experts=4),
        LAYERS * (EXPERTS + 2 * H) + OUTSIDE,
    ),
    # Four norms a layer, all outside attention.
    "glm4": (Glm4Config(**DENSE), LAYERS * (MLP + 4 * H) + OUTSIDE),
    # The first layer dense, the second with experts and one shared expert.
    "glm4_moe": (
        Glm4MoeConfig(
            **MOE, n_routed_experts=4, first_k_dense_replace=1, n_shared_experts=1,
            n_group=1, topk_group=1,
        ),
        MLP + EXPERTS + 3 * H * 8 + LAYERS * 2 * H + OUTSIDE,
    ),
    "gemma": (GemmaConfig(**DENSE), LAYERS * (MLP + 2 * H) + OUTSIDE),
    # Experts with biases: gate and up (H x 2FF + 2FF), down (FF x H + H).
    "gpt_oss": (
        GptOssConfig(
            **DENSE, num_local_experts=4, num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        LAYERS * (4 * (H * 2 * FF + 2 * FF + FF * H + H) + 2 * H) + OUTSIDE,
    ),
}  # fmt: skip


def model_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def compute(**learner: Any) -> Compute:
    return Compute.chosen(LearnerSettings(**learner))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_critic_trains_this_many_parameters_and_none_of_attention(family: str) -> None:
    config, want = FAMILIES[family]
    model = model_of(config)
    critic = CriticNetwork(model, Decoder.of(model), 0)
    trained = critic_parameters(critic)
    assert sum(p.numel() for p in trained.values()) == want
    forbidden = (".self_attn.", "embed_tokens", ".gate.", ".router.", "sinks")
    assert not [name for name in trained if any(word in name for word in forbidden)]
    assert {"head.weight", "head.bias"} <= set(trained)


def test_with_attention_trained_embeddings_and_routers_alone_stay_frozen() -> None:
    model = model_of(FAMILIES["qwen3_moe"][0])
    critic = CriticNetwork(model, Decoder.of(model), 0)
    more = critic_parameters(critic, train_attention=True)
    # q and o: 4 heads of 4; k and v: 2 heads of 4; q_norm and k_norm: 4 each.
    attention = LAYERS * (2 * H * 16 + 2 * H * 8 + 2 * 4)
    want = FAMILIES["qwen3_moe"][1] + attention
    assert sum(p.numel() for p in more.values()) == want
    frozen = critic.state_dict().keys() - more.keys()
    assert frozen == {
        "backbone.embed_tokens.weight", *(f"backbone.layers.{n}.mlp.gate.weight" for n in (0, 1))
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_s_top_layer_and_final_norm_train_and_nothing_else(family: str) -> None:
    model = model_of(FAMILIES[family][0])
    decoder = Decoder.of(model)
    trained = policy_parameters(model, decoder, 1)
    top = sum(p.numel() for p in decoder.layers[1].parameters())
    assert sum(p.numel() for p in trained.values()) == top + H
    assert all(
        name.startswith("model.layers.1.") or name == "model.norm.weight" for name in trained
    )


@pytest.mark.parametrize("layers", [0, LAYERS, LAYERS + 5])
def test_all_layers_means_all_parameters_embedding_and_head_too(layers: int) -> None:
    model = model_of(FAMILIES["llama"][0])
    trained = policy_parameters(model, Decoder.of(model), layers)
    assert trained.keys() == dict(model.named_parameters()).keys()


def test_an_architecture_whose_attention_cannot_be_named_is_an_error() -> None:
    model = model_of(FAMILIES["llama"][0])
    for layer in model.model.layers:
        layer.mixer = layer.self_attn
        del layer.self_attn
    critic = CriticNetwork.__new__(CriticNetwork)
    nn.Module.__init__(critic)
    critic.backbone = model.model
    with pytest.raises(ModelError, match="attention cannot be named"):
        critic_parameters(critic)


def test_experts_whose_router_cannot_be_named_are_an_error() -> None:
    model = model_of(FAMILIES["qwen3_moe"][0])
    critic = CriticNetwork(model, Decoder.of(model), 0)
    for layer in critic.layers:
        layer.mlp.chooser = layer.mlp.gate
        del layer.mlp.gate
    with pytest.raises(ModelError, match="router cannot be named"):
        critic_parameters(critic)


def test_a_model_that_changes_its_logits_after_the_head_is_refused() -> None:
    model = model_of(Gemma2Config(**DENSE, final_logit_softcapping=0.5))
    with pytest.raises(ModelError, match="changes its logits"):
        Decoder.of(model)


def test_the_value_of_a_state_is_the_output_one_position_earlier() -> None:
    model = model_of(FAMILIES["llama"][0])
    critic = CriticNetwork(model, Decoder.of(model), 1)
    nn.init.normal_(critic.head.weight)
    ids = torch.randint(0, V, (2, 7))
    with torch.no_grad():
        values = critic(ids)
        hidden = critic.backbone(input_ids=ids, use_cache=False).last_hidden_state
        outputs = critic.head(hidden)[..., 0]
        changed = critic(torch.cat([ids[:, :4], (ids[:, 4:] + 1) % V], dim=1))
    assert torch.equal(values[:, 1:], outputs[:, :-1])
    assert values[:, 0].tolist() == [0.0, 0.0]
    # V(s_4) has seen tokens 0..3 alone, so what token 4 is cannot move it.
    assert torch.equal(values[:, :5], changed[:, :5])
    assert not torch.equal(values[:, 5:], changed[:, 5:])


def test_the_critic_starts_at_zero_and_shares_no_storage_with_the_policy() -> None:
    model = model_of(FAMILIES["llama"][0])
    critic = CriticNetwork(model, Decoder.of(model), 1)
    assert len(critic.layers) == 1
    assert len(model.model.layers) == LAYERS
    assert model.config.num_hidden_layers == LAYERS
    assert not critic(torch.randint(0, V, (1, 5))).any()
    ours = {p.data_ptr() for p in critic.parameters()}
    assert ours.isdisjoint({p.data_ptr() for p in model.parameters()})
    assert critic.head.weight.dtype == torch.float32


def test_dropout_is_off_whatever_the_checkpoint_says(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", attention_dropout=0.1)
    assert json.loads((folder / "config.json").read_text())["attention_dropout"] == 0.1
    model = compute(dtype="float32").load(folder)
    assert model.config.attention_dropout == 0.0
    model.train()  # even so
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_a_missing_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        compute().load(tmp_path / "nothing")


def test_a_checkpoint_whose_names_do_not_match_is_a_model_error(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ModelError, match=r"do not match.*layers\.3"):
        compute().load(folder)


def test_fp32_values_are_loaded_where_the_folder_is_wider_than_the_compute_dtype(
    tmp_path: Path,
) -> None:
    wide = make_folder(tmp_path / "f32", torch.float32)
    narrow = make_folder(tmp_path / "bf16", torch.bfloat16)
    assert compute(dtype="bfloat16").load_exact(wide).dtype == torch.float32
    assert compute(dtype="bfloat16").load_exact(narrow) is None
    assert compute(dtype="float32").load_exact(wide) is None


def test_choices_by_hardware() -> None:
    cpu = torch.device("cpu")
    assert pick_dtype("float32", cpu) == torch.float32
    assert pick_dtype("bfloat16", cpu) == torch.bfloat16
    assert pick_dtype("auto", cpu) in (torch.float32, torch.bfloat16)
    assert pick_attention(cpu, 1024) == "eager"
    assert pick_attention(cpu, 100_000) == "sdpa"
    assert pick_attention(torch.device("cuda"), 1024) == "sdpa"
