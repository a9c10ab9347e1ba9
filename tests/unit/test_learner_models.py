"""What is loaded, what trains and what is frozen; counts by family: test_learner_architectures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES, model_of
from tiny_llama import VOCABULARY, make_folder
from torch import nn

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

LAYERS, V = 3, VOCABULARY


def compute(**learner: Any) -> Compute:
    return Compute.chosen(LearnerSettings(**learner))


def test_with_attention_trained_embeddings_and_routers_alone_stay_frozen() -> None:
    model = model_of("qwen3_moe")
    critic = CriticNetwork(model, Decoder.of(model), 0)
    fewer, more = critic_parameters(critic), critic_parameters(critic, train_attention=True)
    # q and o: 4 heads of 4 for a width of 16; k and v: 2 heads; q_norm and k_norm: 4 each.
    attention = LAYERS * (2 * 16 * 16 + 2 * 16 * 8 + 2 * 4)
    counts = [sum(p.numel() for p in found.values()) for found in (fewer, more)]
    assert counts[1] - counts[0] == attention
    frozen = critic.state_dict().keys() - more.keys()
    routers = {f"backbone.layers.{n}.mlp.gate.weight" for n in range(LAYERS)}
    assert frozen == {"backbone.embed_tokens.weight", *routers}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policy_s_top_layer_and_final_norm_train_and_nothing_else(family: str) -> None:
    model = model_of(family)
    decoder = Decoder.of(model)
    trained = policy_parameters(model, decoder, 1)
    top = sum(p.numel() for p in decoder.layers[2].parameters())
    assert sum(p.numel() for p in trained.values()) == top + 16
    assert all(
        name.startswith("model.layers.2.") or name == "model.norm.weight" for name in trained
    )


@pytest.mark.parametrize("layers", [0, LAYERS, LAYERS + 5])
def test_all_layers_means_all_parameters_embedding_and_head_too(layers: int) -> None:
    model = model_of("llama")
    trained = policy_parameters(model, Decoder.of(model), layers)
    assert trained.keys() == dict(model.named_parameters()).keys()


def test_the_value_of_a_state_is_the_output_one_position_earlier() -> None:
    model = model_of("llama")
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
    model = model_of("llama")
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
