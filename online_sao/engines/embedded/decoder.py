"""Forward passes for a changing set of replies. Two ways, one interface (`Decoder`).

`SlotDecoder` runs transformers' own model in one batch whose rows come and go: keys and values
lie in slots allocated once, every row at its own length, so nothing is concatenated, padded or
shifted when a reply joins or leaves. It enters by transformers' own doors: the `cache` argument
and a registered attention function. `PlainDecoder` decodes row by row with whatever cache the
model makes for itself; slower, but it serves any causal model (sliding windows, recurrent
states). `make_decoder` measures on a few tokens which of them is right for a model.

Shapes: n rows, q new tokens per row, h heads, d head size, w columns of cache, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import mmap
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

logger = logging.getLogger(__name__)

ATTENTION = "online_sao_slots"
PLAIN_ATTENTION = "sdpa"
PARITY_FP32 = 1e-3
PARITY_HALF = 0.25
"""Largest mean |difference| of log-probabilities at which the two ways count as one (nats)."""


class Decoder(Protocol):
    """Rows 0..n-1 are the replies being decoded; one more row, the scratch, is being prefilled."""

    def set_model(self, model: nn.Module) -> None:
        """Use `model` from now on; forgets every row."""
        ...

    def prefill(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Append rows with these tokens; logits (n, V) after the last token of each."""
        ...

    def prefill_scratch(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens to the scratch row; logits (1, V) after the last."""
        ...

    def adopt_scratch(self) -> None:
        """The scratch row becomes the last row; the scratch is empty again."""
        ...

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to every row; logits (n, V)."""
        ...

    def drop(self, row: int) -> None:
        """Forget `row`; the last row takes its place."""
        ...

    def drop_scratch(self) -> None:
        """Forget the scratch row."""
        ...

    def score(self, tokens: Sequence[int]) -> Tensor:
        """Logits (q, V) after every token; no row changes. The scratch must be empty."""
        ...

    def release(self) -> None:
        """Give memory back while there are no rows."""
        ...


class _Store:
    """Keys (or values) of one layer: (slots, h, capacity, d), on the CPU untouched until used."""

    def __init__(self, slots: int, capacity: int, like: Tensor) -> None:
        shape = (slots, like.shape[1], capacity, like.shape[3])
        self._pages: mmap.mmap | None = None
        if like.device.type != "cpu":
            self.data = torch.zeros(shape, dtype=like.dtype, device=like.device)
            return
        size = torch.Size(shape).numel() * like.element_size()
        self._pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._pages.madvise(mmap.MADV_NOHUGEPAGE)
        raw = torch.frombuffer(self._pages, dtype=torch.uint8)
        self.data = raw.view(like.dtype).view(shape)

    def release(self) -> None:
        """Return the pages to the system; they read as zero afterwards."""
        if self._pages is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._pages.madvise(mmap.MADV_DONTNEED)


class SlotCache:
    """What transformers sees as its `cache`: where new keys and values go, and what is attended.

    Before a forward pass its owner says which rows are written and at which column.
    """

    is_compileable = False

    def __init__(self, slots: int, capacity: int) -> None:
        self._slots, self._capacity = slots, capacity
        self._layers: list[tuple[_Store, _Store]] = []
        self._rows = slice(0, 0)
        self._start = 0
        self._columns: Tensor | None = None
        self._width = 0

    def write_block(self, first_row: int, rows: int, start: int) -> None:
        """The next pass appends q tokens to each of `rows` rows from column `start`."""
        self._rows, self._start, self._columns = slice(first_row, first_row + rows), start, None

    def write_columns(self, columns: Tensor, width: int) -> None:
        """The next pass appends one token to row i at column `columns[i]`."""
        self._columns, self._width = columns, width

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """transformers calls this in every layer with new keys and values (n, h, q, d)."""
        while len(self._layers) <= layer_idx:
            self._layers.append(
                (
                    _Store(self._slots, self._capacity, keys),
                    _Store(self._slots, self._capacity, values),
                )
            )
        stores = self._layers[layer_idx]
        return self._put(stores[0].data, keys), self._put(stores[1].data, values)

    def _put(self, store: Tensor, new: Tensor) -> Tensor:
        if self._columns is not None:
            rows = torch.arange(new.shape[0], device=new.device)
            store[rows, :, self._columns] = new[:, :, 0]
            return store[: new.shape[0], :, : self._width]
        end = self._start + new.shape[2]
        store[self._rows, :, self._start : end] = new
        return new if self._start == 0 else store[self._rows, :, :end]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` columns of one row over another's."""
        with torch.inference_mode():
            for pair in self._layers:
                for store in pair:
                    store.data[target, :, :length] = store.data[source, :, :length]

    def release(self) -> None:
        """Return all pages to the system."""
        for pair in self._layers:
            for store in pair:
                store.release()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given explicitly; transformers asks all the same."""
        return 0


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **special: Any,
) -> tuple[Tensor, None]:
    """Scaled dot-product attention over slots; (n, h, q, d) in, (n, q, h, d) out.

    A mask of one column means: causal within the new tokens. With one query per row the heads
    that share keys are laid side by side as queries, so keys are never repeated in memory.
    """
    for name in ("softcap", "s_aux", "sliding_window", "position_bias"):
        if special.get(name) is not None:
            raise NotImplementedError(f"slot attention knows no {name}")
    rows, heads, queries, size = query.shape
    key_heads = key.shape[1]
    if queries == 1:
        grouped = query.reshape(rows, key_heads, heads // key_heads, size)
        mixed = functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        )
        return mixed.reshape(rows, 1, heads, size), None
    causal = attention_mask.shape[-1] == 1
    mixed = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if causal else attention_mask,
        is_causal=causal,
        scale=scaling,
        enable_gqa=heads != key_heads,
    )
    return mixed.transpose(1, 2), None


def cache_argument(model: nn.Module) -> str:
    """transformers renamed `past_key_values` to `cache`; which one this model takes."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


class SlotDecoder:
    """Batched decoding on slots (see the module's text)."""

    def __init__(self, model: nn.Module, *, slots: int, capacity: int) -> None:
        AttentionInterface.register(ATTENTION, slot_attention)
        self._slots, self._scratch, self._capacity = slots, slots, capacity
        self._lengths: list[int] = []
        self._scratch_length = 0
        self.set_model(model)

    def set_model(self, model: nn.Module) -> None:
        """Use `model` from now on; forgets every row."""
        model.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        first = next(model.parameters())
        self._model, self._device, self._dtype = model, first.device, first.dtype
        self._argument = cache_argument(model)
        # An odd number of lines between rows keeps them from sharing the same cache sets.
        self._cache = SlotCache(self._slots + 1, self._capacity + 16)
        self._lengths, self._scratch_length = [], 0

    def prefill(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Append rows with these tokens; logits (n, V) after the last token of each."""
        width, first = max(map(len, rows)), len(self._lengths)
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        last = torch.tensor([len(row) - 1 for row in rows])
        keep, where = torch.unique(last, return_inverse=True)
        self._cache.write_block(first, len(rows), 0)
        logits = self._forward(ids, torch.arange(width)[None].expand(len(rows), -1), None, keep)
        self._lengths += [len(row) for row in rows]
        return logits[torch.arange(len(rows)), where]

    def prefill_scratch(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens to the scratch row; logits (1, V) after the last."""
        return self._extend_scratch(tokens, keep=torch.tensor([len(tokens) - 1]))[:, 0]

    def adopt_scratch(self) -> None:
        """The scratch row becomes the last row."""
        self._cache.move(self._scratch, len(self._lengths), self._scratch_length)
        self._lengths.append(self._scratch_length)
        self._scratch_length = 0

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to every row; logits (n, V)."""
        columns = torch.tensor(self._lengths, device=self._device)
        width = max(self._lengths) + 1
        reach = torch.arange(width, device=self._device)[None] > columns[:, None]
        mask = torch.zeros(reach.shape, dtype=self._dtype, device=self._device)
        mask = mask.masked_fill_(reach, -torch.inf)[:, None, None]
        self._cache.write_columns(columns, width)
        logits = self._forward(torch.tensor(tokens)[:, None], columns[:, None], mask, 1)
        self._lengths = [length + 1 for length in self._lengths]
        return logits[:, -1]

    def drop(self, row: int) -> None:
        """Forget `row`; the last row takes its place."""
        length = self._lengths.pop()
        if row < len(self._lengths):
            self._cache.move(len(self._lengths), row, length)
            self._lengths[row] = length

    def drop_scratch(self) -> None:
        """Forget the scratch row."""
        self._scratch_length = 0

    def score(self, tokens: Sequence[int]) -> Tensor:
        """Logits (q, V) after every token, through the scratch row."""
        logits = self._extend_scratch(tokens, keep=0)[0]
        self._scratch_length = 0
        return logits

    def release(self) -> None:
        """Give memory back while there are no rows."""
        self._cache.release()

    def _extend_scratch(self, tokens: Sequence[int], keep: Tensor | int) -> Tensor:
        start, count = self._scratch_length, len(tokens)
        positions = torch.arange(start, start + count)
        mask = None
        if start > 0:
            future = torch.arange(start + count)[None] > positions[:, None]
            mask = torch.zeros(future.shape, dtype=self._dtype).masked_fill_(future, -torch.inf)
            mask = mask[None, None].to(self._device)
        self._cache.write_block(self._scratch, 1, start)
        logits = self._forward(torch.tensor([list(tokens)]), positions[None], mask, keep)
        self._scratch_length += count
        return logits

    def _forward(
        self, ids: Tensor, positions: Tensor, mask: Tensor | None, keep: Tensor | int
    ) -> Tensor:
        if mask is None:
            mask = torch.zeros(1, 1, 1, 1, dtype=self._dtype, device=self._device)
        with torch.inference_mode():
            out = self._model(
                input_ids=ids.to(self._device),
                position_ids=positions.to(self._device),
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=keep.to(self._device) if isinstance(keep, Tensor) else keep,
                **{self._argument: self._cache},
            )
        logits: Tensor = out.logits
        return logits


class PlainDecoder:
    """Row by row, with the cache that the model makes for itself."""

    def __init__(self, model: nn.Module) -> None:
        self._rows: list[tuple[list[int], Any]] = []
        self._scratch: tuple[list[int], Any] = ([], None)
        self.set_model(model)

    def set_model(self, model: nn.Module) -> None:
        """Use `model` from now on; forgets every row."""
        self._model, self._device = model, next(model.parameters()).device
        self._argument = cache_argument(model)
        self._rows, self._scratch = [], ([], None)

    def prefill(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Append rows with these tokens; logits (n, V) after the last token of each."""
        logits = []
        for tokens in rows:
            out, row = self._extend(([], None), tokens)
            self._rows.append(row)
            logits.append(out[-1])
        return torch.stack(logits)

    def prefill_scratch(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens to the scratch row; logits (1, V) after the last."""
        logits, self._scratch = self._extend(self._scratch, tokens)
        return logits[-1:]

    def adopt_scratch(self) -> None:
        """The scratch row becomes the last row."""
        self._rows.append(self._scratch)
        self._scratch = ([], None)

    def decode(self, tokens: Sequence[int]) -> Tensor:
        """Append one token to every row; logits (n, V)."""
        logits = []
        for index, token in enumerate(tokens):
            out, self._rows[index] = self._extend(self._rows[index], [token])
            logits.append(out[-1])
        return torch.stack(logits)

    def drop(self, row: int) -> None:
        """Forget `row`; the last row takes its place."""
        last = self._rows.pop()
        if row < len(self._rows):
            self._rows[row] = last

    def drop_scratch(self) -> None:
        """Forget the scratch row."""
        self._scratch = ([], None)

    def score(self, tokens: Sequence[int]) -> Tensor:
        """Logits (q, V) after every token."""
        return self._extend(([], None), tokens)[0]

    def release(self) -> None:
        """Nothing is kept without rows."""

    def _extend(
        self, row: tuple[list[int], Any], tokens: Sequence[int]
    ) -> tuple[Tensor, tuple[list[int], Any]]:
        known, cache = row
        ids = [*known, *tokens]
        feed = ids if cache is None else list(tokens)
        given = {} if cache is None else {self._argument: cache}
        with torch.inference_mode():
            out = self._model(
                input_ids=torch.tensor([feed], device=self._device), use_cache=True, **given
            )
        # A model with a state of another kind gives no such cache: its rows are computed anew.
        cache = getattr(out, "cache", None) or getattr(out, "past_key_values", None)
        return out.logits[0, -len(tokens) :], (ids, cache)


def make_decoder(model: nn.Module, *, slots: int, capacity: int, sample: Sequence[int]) -> Decoder:
    """The batched decoder where it computes what the model's own forward does, else the plain one.

    `sample`: at least 8 token ids to measure with.
    """
    before = model.config._attn_implementation  # type: ignore[union-attr]
    try:
        decoder = SlotDecoder(model, slots=slots, capacity=capacity)
        found = _try(decoder, sample)
    except (
        AttributeError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as e:
        logger.info("action=slot_decoder_refused reason=%s", str(e).splitlines()[:1])
        found = None
    model.set_attn_implementation(before)  # type: ignore[operator]
    plain = PlainDecoder(model)
    if found is not None:
        error = (found - _try(plain, sample)).abs().mean().item()
        limit = PARITY_FP32 if model.dtype == torch.float32 else PARITY_HALF
        logger.info("action=slot_decoder_checked error=%.2g limit=%.2g", error, limit)
        if error <= limit:
            decoder.set_model(model)
            return decoder
    logger.warning("action=plain_decoder_chosen detail=replies are decoded one by one")
    return plain


def _try(decoder: Decoder, sample: Sequence[int]) -> Tensor:
    """Log-probabilities after two joined rows, a chunked third, a drop and a decoding step."""
    half = len(sample) // 2
    outputs = [decoder.prefill([sample, sample[:half]])]
    decoder.prefill_scratch(sample[:half])
    outputs.append(decoder.prefill_scratch(sample[half:]))
    decoder.adopt_scratch()
    outputs.append(decoder.decode([sample[0], sample[1], sample[2]]))
    decoder.drop(0)
    outputs.append(decoder.decode([sample[3], sample[4]]))
    return torch.cat(outputs).float().log_softmax(-1)
