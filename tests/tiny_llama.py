"""Makes tiny random Llamas, as folders that the learner takes for a start policy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from online_sao.learner.export import describe
from online_sao.manifest import MANIFEST_NAME
from online_sao.types import Trajectory

VOCABULARY = 64
PROBES = tuple(range(3, 19))


def make_folder(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> Path:
    """A servable version folder with a random Llama of 3 layers; the same one every time."""
    shape = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "tie_word_embeddings": True, "initializer_range": 0.2,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**shape, **config})).to(dtype)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"note": "no tokenizer is needed"}')
    write_manifest(folder)
    return folder


def write_manifest(folder: Path) -> None:
    (folder / MANIFEST_NAME).write_text(describe(folder, PROBES).to_json())


@torch.no_grad()
def sampled(
    folder: Path, count: int, *, temperature: float = 1.0, seed: int = 0, favourite: int = -1
) -> list[Trajectory]:
    """Trajectories sampled from the model in `folder` in fp32, their own log-probabilities kept.

    Prompts of 2-5 tokens, replies of 3-9. Reward 1 where the reply has the token `favourite`,
    or by chance if there is none.
    """
    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", attention_dropout=0.0
    ).eval()
    generator, dice = torch.Generator().manual_seed(seed), random.Random(seed)
    trajectories = []
    for number in range(count):
        ids = [dice.randrange(3, VOCABULARY) for _ in range(dice.randint(2, 5))]
        prompt, logprobs = len(ids), []
        for _ in range(dice.randint(3, 9)):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1] / temperature
            log_p = logits.log_softmax(-1)
            token = int(torch.multinomial(log_p.exp(), 1, generator=generator))
            logprobs.append(float(log_p[token]))
            ids.append(token)
        hit = favourite in ids[prompt:] if favourite >= 0 else dice.random() < 0.5
        trajectories.append(
            Trajectory(
                rollout_ids=(f"rollout-{number}",),
                token_ids=tuple(ids),
                action_mask=(False,) * prompt + (True,) * len(logprobs),
                logprobs=(float("nan"),) * prompt + tuple(logprobs),
                reward=float(hit),
                temperature=temperature,
            )
        )
    return trajectories


@torch.no_grad()
def rescored(folder: Path, batch: Sequence[Trajectory]) -> list[Trajectory]:
    """The same trajectories with the log-probabilities that the model in `folder` gives them."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for t in batch:
        log_p = model(input_ids=torch.tensor([t.token_ids])).logits[0].log_softmax(-1)
        logprobs = [
            float(log_p[i - 1, token]) if action else math.nan
            for i, (token, action) in enumerate(zip(t.token_ids, t.action_mask, strict=True))
        ]
        found.append(replace(t, logprobs=tuple(logprobs)))
    return found
