"""Tiny random models of every family that is promised, as folders the learner starts from."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import torch
from tiny_llama import VOCABULARY, write_manifest
from transformers import AutoModelForCausalLM
from transformers.models.cohere import CohereConfig
from transformers.models.gemma import GemmaConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.glm4 import Glm4Config
from transformers.models.glm4_moe import Glm4MoeConfig
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.granite import GraniteConfig
from transformers.models.llama import LlamaConfig
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

from online_sao.types import Trajectory

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 64, "pad_token_id": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {**SHAPE, "moe_intermediate_size": 8, "num_experts_per_tok": 2}
MIXED = {
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "qwen3_moe": Qwen3MoeConfig(**MOE, num_experts=4),
    "glm4": Glm4Config(**SHAPE),
    "glm4_moe": Glm4MoeConfig(
        **MOE, n_routed_experts=4, first_k_dense_replace=1, n_shared_experts=1, n_group=1,
        topk_group=1, use_qk_norm=True,
    ),
    "gemma": GemmaConfig(**SHAPE),
    "gemma2": Gemma2Config(
        **SHAPE, **MIXED, final_logit_softcapping=2.0, attn_logit_softcapping=3.0,
        query_pre_attn_scalar=4,
    ),
    "gemma3_text": Gemma3TextConfig(**SHAPE, **MIXED, query_pre_attn_scalar=4),
    "gpt_oss": GptOssConfig(
        **SHAPE, **MIXED, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "granite": GraniteConfig(**SHAPE, logits_scaling=3.0, tie_word_embeddings=True),
    "cohere": CohereConfig(**SHAPE, logit_scale=0.4),
}  # fmt: skip
"""Windows are shorter than the trajectories below, so masks differ from layer to layer."""


def model_of(family: str) -> Any:
    """The family's model; every number in it random, norms, biases, sinks and routers too."""
    torch.manual_seed(0)
    config = copy.deepcopy(FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if "bias" in n)):
            tensor.add_(torch.randn_like(tensor), alpha=0.2)
    return model.eval().requires_grad_(False)


def family_folder(folder: Path, family: str, dtype: torch.dtype = torch.float32) -> Path:
    """`model_of` as a servable version folder; GLM's expert loads stay fp32, as it stores them."""
    model = model_of(family).to(dtype)
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias = module.e_score_correction_bias.float()
    model.save_pretrained(folder)
    write_manifest(folder)
    return folder


@torch.no_grad()
def replies(folder: Path, count: int, seed: int = 0) -> list[Trajectory]:
    """Random prompts and replies of 6-14 tokens together, with the log-probabilities that the
    model in `folder` gives them in fp32; rewards 1 and 0 in turn.
    """
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    dice, found = random.Random(seed), []
    for number in range(count):
        ids = [dice.randrange(3, VOCABULARY) for _ in range(dice.randint(6, 14))]
        prompt = dice.randint(1, 4)
        log_p = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)
        logprobs = [float(log_p[t - 1, ids[t]]) for t in range(prompt, len(ids))]
        found.append(
            Trajectory(
                rollout_ids=(f"rollout-{number}",),
                token_ids=tuple(ids),
                action_mask=(False,) * prompt + (True,) * len(logprobs),
                logprobs=(float("nan"),) * prompt + tuple(logprobs),
                reward=float(number % 2 == 0),
                temperature=1.0,
            )
        )
    return found
