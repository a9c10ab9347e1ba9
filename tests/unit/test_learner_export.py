"""Servable folders: the start folder's own tensors, whatever the architecture calls them."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import PROBES, make_folder, sampled, write_manifest
from transformers import LlamaForCausalLM
from transformers.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM

from online_sao.config import AlgorithmSettings, LearnerSettings
from online_sao.errors import LearnerError, ModelError
from online_sao.learner.checkpoints import VersionFolders
from online_sao.learner.trainer import SaoTrainer
from online_sao.manifest import MANIFEST_NAME, Manifest


def trained(base: Path, **learner: object) -> SaoTrainer:
    settings = {"policy_lr": 1e-2, "policy_layers": 1, "dtype": "float32", **learner}
    trainer = SaoTrainer(AlgorithmSettings(), LearnerSettings.model_validate(settings), base)
    trainer.restore(base, None)
    trainer.update(sampled(base, 4), critic_only=False)
    return trainer


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_what_does_not_train_keeps_its_bytes_in_any_dtype(
    tmp_path: Path, stored: torch.dtype, compute: str
) -> None:
    base = make_folder(tmp_path / "base", stored)
    trained(base, dtype=compute).export_policy(tmp_path / "v")
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "v"))
    assert before.keys() == after.keys()
    for name in before:
        trains = name.startswith("model.layers.2.") or name == "model.norm.weight"
        assert after[name].dtype == stored
        assert torch.equal(before[name], after[name]) != trains, name


def test_probes_are_what_the_written_bytes_give_in_fp32(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", torch.bfloat16)
    trained(base, dtype="bfloat16").export_policy(tmp_path / "v")
    probes = Manifest.read(tmp_path / "v").probes
    model = LlamaForCausalLM.from_pretrained(tmp_path / "v", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([PROBES])).logits[0]
    want = [float(logits[t].log_softmax(-1)[PROBES[t + 1]]) for t in range(len(PROBES) - 1)]
    assert probes.token_ids == PROBES
    assert probes.logprobs == pytest.approx(want, abs=1e-5)
    assert probes.logprobs != Manifest.read(base).probes.logprobs


def test_a_tied_head_that_is_stored_twice_is_written_twice(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    write_manifest(base)
    trained(base, policy_layers=0).export_policy(tmp_path / "v")
    after = load_file(tmp_path / "v" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert not torch.equal(after["lm_head.weight"], tensors["lm_head.weight"])


def test_an_untied_head_trains_and_is_written_on_its_own(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base", tie_word_embeddings=False)
    trained(base, policy_layers=0).export_policy(tmp_path / "v")
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "v"))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert not torch.equal(before[name], after[name])


def test_shards_stay_shards(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    halves = [sorted(tensors)[::2], sorted(tensors)[1::2]]
    weight_map = {}
    for number, half in enumerate(halves):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in half}, base / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(half, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    write_manifest(base)
    trained(base).export_policy(tmp_path / "v")
    assert {f.name for f in (tmp_path / "v").iterdir()} == {f.name for f in base.iterdir()}
    assert dict(Manifest.read(tmp_path / "v").tensors) == dict(Manifest.read(base).tensors)


def test_experts_are_written_under_the_checkpoint_s_names(tmp_path: Path) -> None:
    """In memory they are one 3-D parameter, in the checkpoint one tensor an expert."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, moe_intermediate_size=16,
        num_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=2, pad_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    base = tmp_path / "base"
    Qwen3MoeForCausalLM(config).save_pretrained(base)
    write_manifest(base)
    names = Manifest.read(base).tensors
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in names
    llama = make_folder(tmp_path / "llama")
    settings = LearnerSettings(policy_lr=1e-2, policy_layers=1, critic_layers=1, dtype="float32")
    trainer = SaoTrainer(AlgorithmSettings(), settings, base)
    trainer.restore(base, None)
    trainer.update(sampled(llama, 4), critic_only=False)
    trainer.export_policy(tmp_path / "v")
    assert dict(Manifest.read(tmp_path / "v").tensors) == dict(names)
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "v"))
    for name in names:
        trains = name.startswith("model.layers.1.") or name == "model.norm.weight"
        assert trains or torch.equal(before[name], after[name]), name
    moved = "model.layers.1.mlp.experts.3.up_proj.weight"
    assert not torch.equal(before[moved], after[moved])
    again = SaoTrainer(AlgorithmSettings(), settings, base)
    again.restore(tmp_path / "v", None)
    again.export_policy(tmp_path / "v2")
    assert Manifest.read(tmp_path / "v2").sha256 == Manifest.read(tmp_path / "v").sha256


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    other = make_folder(tmp_path / "other", intermediate_size=64)
    trainer = SaoTrainer(AlgorithmSettings(), LearnerSettings(), base)
    with pytest.raises(ModelError, match="does not hold the tensors of"):
        trainer.restore(other, None)


def test_a_start_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    (base / MANIFEST_NAME).unlink()
    with pytest.raises(ModelError, match=r"no manifest\.json"):
        SaoTrainer(AlgorithmSettings(), LearnerSettings(), base).restore(base, None)


def test_the_folder_restored_from_may_be_pruned_meanwhile(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    trainer = trained(base)
    trainer.export_policy(tmp_path / "v1")
    trainer.restore(tmp_path / "v1", None)
    want = Manifest.read(tmp_path / "v1").sha256
    for file in (tmp_path / "v1").iterdir():
        file.unlink()
    (tmp_path / "v1").rmdir()
    trainer.export_policy(tmp_path / "v2")
    assert Manifest.read(tmp_path / "v2").sha256 == want


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """The kernel refuses to write more, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_written_whole_leaves_no_version(tmp_path: Path) -> None:
    base = make_folder(tmp_path / "base")
    trainer, versions = trained(base), tmp_path / "versions"
    with files_no_larger_than(20_000), pytest.raises(LearnerError, match="could not be written"):
        VersionFolders(versions).write(trainer.export_policy, 0)
    assert list(versions.iterdir()) == []
    VersionFolders(versions).write(trainer.export_policy, 0)
