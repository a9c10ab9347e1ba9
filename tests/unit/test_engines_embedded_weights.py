"""Reading, hashing, checking and packing weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from online_sao.engines.embedded import weights as loading
from online_sao.engines.embedded.weights import PackedLinear
from online_sao.errors import ModelError, VersionFolderError
from online_sao.manifest import Manifest, combine_hashes
from online_sao.numerics import ExactHead
from online_sao.types import ProbeTokens

CPU = torch.device("cpu")


def llama(*, tied: bool = True, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=tied, initializer_range=0.2, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def write(folder: Path, model: Any) -> Manifest:
    folder.mkdir(exist_ok=True)
    model.save_pretrained(folder)
    manifest = Manifest.describe(folder, ProbeTokens((3, 4, 5), (-1.0, -1.0)))
    (folder / "manifest.json").write_text(manifest.to_json())
    return manifest


def load(folder: Path, dtype: torch.dtype = torch.float32, **more: Any) -> loading.Weights:
    return loading.load_weights(folder, 7, dtype=dtype, device=CPU, **more)


def test_tensors_and_hash_are_those_of_the_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.tensor([1.5], dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7, dtype=torch.int64),
    }
    path = tmp_path / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    found, sha256 = loading.read_safetensors(path)
    assert sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("damage", ["cut", "longer", "header", "empty"])
def test_a_damaged_file_is_named_and_never_half_used(tmp_path: Path, damage: str) -> None:
    write(tmp_path, llama())
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    changed = {"cut": data[:-3], "longer": data + b"x", "header": b"\xff" * 16, "empty": b""}
    path.write_bytes(changed[damage])
    with pytest.raises(VersionFolderError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_loaded_version_computes_what_was_saved_and_reports_the_manifests_hash(
    tmp_path: Path,
) -> None:
    model = llama()
    manifest = write(tmp_path, model)
    found = load(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(found.model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert found.sha256 == manifest.sha256 == combine_hashes(manifest.files)
    assert found.version == 7


def test_tied_weights_stay_one_and_a_changed_embedding_reaches_the_packed_head(
    tmp_path: Path,
) -> None:
    """In bf16 the head is a packed copy: it must be made of the new embedding."""
    write(tmp_path / "old", llama(seed=0))
    changed = llama(seed=0)
    changed.model.embed_tokens.weight[50] += 1.0
    write(tmp_path / "new", changed)
    old = load(tmp_path / "old", torch.bfloat16).model
    new = load(tmp_path / "new", torch.bfloat16).model
    ids, other = torch.tensor([[3, 50, 5]]), torch.tensor([[3, 4, 5]])
    for inputs, at_input in ((ids, True), (other, False)):
        a, b = (m(input_ids=inputs).logits.float() for m in (old, new))
        expected = changed.bfloat16()(input_ids=inputs).logits.float()
        changed.float()
        assert (b - expected).abs().mean() < 0.03
        assert (a - b)[0, -1, 50].abs() > 0.2  # as an output
        assert bool((a - b)[0, 1, :50].abs().max() > 0.2) == at_input


def test_packing_changes_no_result_beyond_rounding(tmp_path: Path) -> None:
    if not loading.can_pack():
        assert not any(isinstance(m, PackedLinear) for m in load_packed(tmp_path).modules())
        return
    torch.manual_seed(0)
    linear = nn.Linear(64, 96, dtype=torch.bfloat16).requires_grad_(False)
    for rows in (1, 3, 32, 70):
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
        exact = functional.linear(x.float(), linear.weight.float(), linear.bias.float())
        assert (PackedLinear(linear)(x).float() - exact).abs().max() < 0.03
    packed = load_packed(tmp_path)
    assert isinstance(packed.lm_head, ExactHead)  # its sums must not be rounded
    assert sum(isinstance(m, PackedLinear) for m in packed.modules()) == 2 * 7


def load_packed(folder: Path) -> Any:
    write(folder, llama())
    return load(folder, torch.bfloat16).model


def test_fp32_is_never_packed(tmp_path: Path) -> None:
    write(tmp_path, llama())
    assert not any(isinstance(m, PackedLinear) for m in load(tmp_path).model.modules())


@pytest.mark.parametrize(("key", "word"), [("model.norm.weight", "missing"), (None, "unexpected")])
def test_names_that_do_not_fit_the_config_are_named(
    tmp_path: Path, key: str | None, word: str
) -> None:
    model = llama()
    state = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}
    name = key or "model.stranger"
    if key is None:
        state[name] = torch.zeros(2)
    else:
        del state[name]
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"{word} keys: {name}"):
        loading.build_model(tmp_path, state, dtype=torch.float32)


def test_other_shapes_than_the_served_ones_are_refused_before_anything_is_built(
    tmp_path: Path,
) -> None:
    write(tmp_path, llama())
    served = dict(load(tmp_path).shapes)
    served["model.norm.weight"] = (65,)
    with pytest.raises(VersionFolderError, match=r"tensor model.norm.weight is \(64,\).*\(65,\)"):
        load(tmp_path, shapes=served)


def test_a_retired_model_holds_no_memory(tmp_path: Path) -> None:
    write(tmp_path, llama())
    model = load(tmp_path, torch.bfloat16).model
    loading.retire(model)
    assert sum(p.numel() for p in model.parameters()) == 0
    assert all(m.packed is None for m in model.modules() if isinstance(m, PackedLinear))
