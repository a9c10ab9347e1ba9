"""Both ways of decoding against one plain forward pass, over several model families."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from online_sao.engines.embedded.decoder import PlainDecoder, SlotDecoder, make_decoder

V = 120
SMALL: dict[str, Any] = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "llama": (LlamaConfig(**SMALL), SlotDecoder),
    "llama tied": (LlamaConfig(**SMALL, tie_word_embeddings=True), SlotDecoder),
    "qwen2": (Qwen2Config(**SMALL), SlotDecoder),
    "qwen3": (Qwen3Config(**SMALL, head_dim=16), SlotDecoder),
    "mistral, sliding window": (MistralConfig(**SMALL, sliding_window=6), PlainDecoder),
    "gemma2, soft caps": (
        Gemma2Config(**SMALL, head_dim=8, sliding_window=6, attn_logit_softcapping=5.0),
        PlainDecoder,
    ),
    "gpt2": (
        GPT2Config(vocab_size=V, n_positions=256, n_embd=32, n_layer=2, n_head=4, pad_token_id=0),
        SlotDecoder,
    ),
}


def model_of(config: Any) -> Any:
    torch.manual_seed(2)
    # A config of its own: the way a model attends is written into it.
    return AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval().requires_grad_(False)


def truth(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, -1]
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_that_come_and_go_are_those_of_a_plain_forward_pass(family: str) -> None:
    """120 random steps of joining, decoding, scoring and leaving; every logit compared."""
    config, expected = FAMILIES[family]
    model, reference = model_of(config), model_of(config)
    decoder = make_decoder(model, slots=6, capacity=200, sample=list(range(2, 18)))
    assert type(decoder) is expected
    rng = random.Random(family)
    rows: list[list[int]] = []
    worst = 0.0

    def check(logits: torch.Tensor, sequences: list[list[int]]) -> None:
        nonlocal worst
        for found, ids in zip(logits, sequences, strict=True):
            worst = max(worst, (found - truth(reference, ids)).abs().max().item())

    for _ in range(60):
        action = rng.choice(["prefill", "scratch", "decode", "decode", "drop", "score"])
        if action == "prefill" and len(rows) < 5:
            new = [[rng.randrange(2, V) for _ in range(rng.randint(1, 20))] for _ in "ab"]
            new = new[: 6 - len(rows)]
            check(decoder.prefill(new), new)
            rows += new
        elif action == "scratch" and len(rows) < 6:
            ids = [rng.randrange(2, V) for _ in range(24)]
            decoder.prefill_scratch(ids[:9])
            check(decoder.prefill_scratch(ids[9:]), [ids])
            decoder.adopt_scratch()
            rows.append(ids)
        elif action == "decode" and rows:
            tokens = [rng.randrange(2, V) for _ in rows]
            rows = [[*row, token] for row, token in zip(rows, tokens, strict=True)]
            check(decoder.decode(tokens), rows)
        elif action == "drop" and rows:
            gone = rng.randrange(len(rows))
            decoder.drop(gone)
            last = rows.pop()
            if gone < len(rows):
                rows[gone] = last
        elif action == "score":
            ids = [rng.randrange(2, V) for _ in range(7)]
            check(decoder.score(ids), [ids[: n + 1] for n in range(7)])
    assert worst < 1e-4


@pytest.mark.parametrize("kind", ["slots", "plain"])
def test_a_new_model_forgets_every_row_of_the_old_one(kind: str) -> None:
    first, second = model_of(LlamaConfig(**SMALL)), model_of(LlamaConfig(**SMALL))
    for parameter in second.parameters():
        parameter.data.mul_(1.5)
    decoder = SlotDecoder(first, slots=2, capacity=50) if kind == "slots" else PlainDecoder(first)
    ids = [5, 6, 7, 8]
    before = decoder.prefill([ids])
    decoder.set_model(second)
    after = decoder.prefill([ids])
    second.set_attn_implementation("sdpa")
    assert torch.allclose(after[0], truth(second, ids), atol=1e-5)
    assert not torch.allclose(after, before, atol=1e-2)


def test_released_pages_are_clean_when_they_are_used_again() -> None:
    model = model_of(LlamaConfig(**SMALL))
    decoder = SlotDecoder(model, slots=2, capacity=50)
    before = decoder.prefill([[5, 6, 7]])
    decoder.drop(0)
    decoder.release()
    assert torch.equal(decoder.prefill([[5, 6, 7]]), before)
