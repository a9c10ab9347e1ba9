"""From logits to tokens: one draw per reply, in the order vLLM applies its parameters.

Shapes: B replies, V vocabulary. logit_bias, allowed ids, bad words, min_tokens; penalties;
temperature; min_p; top_k; top_p; then log-probabilities = log_softmax in fp32, of which one token
is drawn. At temperature 0 the likeliest token is taken and reported at temperature 1.

Drawing is by inverse distribution function over blocks (a sum per block, then within one block):
`torch.multinomial` took 30 ms for 32 rows of 49,152, a cumulative sum over all of it 2 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from online_sao.engines.embedded.reply import Draw, Reply

BLOCK = 256
CANDIDATES = 1024
"""top_p is cut among so many likeliest tokens where they hold enough mass, else among all."""


def draw(logits: Tensor, replies: Sequence[Reply]) -> list[Draw]:
    """One token for each reply from its row of `logits` (B, V)."""
    x = logits.float()
    if x.data_ptr() == logits.data_ptr():
        x = x.clone()
    for row, reply in enumerate(replies):
        _adjust(x[row], reply)
    x -= x.amax(-1, keepdim=True)
    temperatures = [reply.sampling.temperature or 1.0 for reply in replies]
    if any(t != 1.0 for t in temperatures):
        x /= torch.tensor(temperatures, device=x.device)[:, None]
    _truncate(x, replies)
    uniforms = [0.0 if r.sampling.temperature == 0.0 else r.rng.random() for r in replies]
    tokens, log_total = _invert(x.exp(), uniforms)
    greedy = [i for i, reply in enumerate(replies) if reply.sampling.temperature == 0.0]
    if greedy:
        tokens[greedy] = x[greedy].argmax(-1)
    logprobs = (x.gather(1, tokens[:, None])[:, 0] - log_total).tolist()
    return [
        Draw(token, min(0.0, logprob), _top(x[row], log_total[row], reply.sampling.top_logprobs))
        for row, (token, logprob, reply) in enumerate(
            zip(tokens.tolist(), logprobs, replies, strict=True)
        )
    ]


def _invert(weights: Tensor, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Tokens (B,) where the distribution function first exceeds u; log of each row's sum (B,)."""
    rows, width = weights.shape
    if width % BLOCK:
        weights = functional.pad(weights, (0, BLOCK - width % BLOCK))
    blocks = weights.view(rows, -1, BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    total = sums[:, -1]
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device) * total
    block = torch.searchsorted(sums, target[:, None], right=True).clamp_(max=sums.shape[1] - 1)
    before = functional.pad(sums, (1, 0)).gather(1, block)
    inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double().cumsum(-1)
    rest = (target[:, None] - before).clamp_(min=0.0)
    rest = torch.minimum(rest, inside[:, -1:] * (1 - 1e-12))
    offset = torch.searchsorted(inside, rest, right=True)
    token = (block * BLOCK + offset)[:, 0].clamp_(max=width - 1)
    return token, total.log().float()


def _adjust(x: Tensor, reply: Reply) -> None:
    """Bias, bans and penalties on one row, in place; most replies ask for none."""
    sampling = reply.sampling
    for token, bias in sampling.logit_bias:
        x[token] += bias
    if sampling.allowed_token_ids:
        keep = torch.tensor(sampling.allowed_token_ids, device=x.device)
        allowed = x[keep]
        x.fill_(-math.inf)
        x[keep] = allowed
    for words in reply.banned:
        if tuple(reply.reply_ids[len(reply.reply_ids) - len(words) + 1 :]) == words[:-1]:
            x[words[-1]] = -math.inf
    if reply.eos_ids and (reply.ignore_eos or not reply.may_end()):
        x[torch.tensor(sorted(reply.eos_ids), device=x.device)] = -math.inf
    _penalise(x, reply)


def _penalise(x: Tensor, reply: Reply) -> None:
    sampling = reply.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*reply.prompt_ids, *reply.reply_ids}), device=x.device)
        logits = x[seen]
        factor = sampling.repetition_penalty
        x[seen] = torch.where(logits > 0, logits / factor, logits * factor)
    if reply.counts and (sampling.frequency_penalty or sampling.presence_penalty):
        ids = torch.tensor(list(reply.counts), device=x.device)
        times = torch.tensor(list(reply.counts.values()), dtype=x.dtype, device=x.device)
        x[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _truncate(x: Tensor, replies: Sequence[Reply]) -> None:
    """min_p, top_k, top_p: logits of dropped tokens become -inf, in place."""
    for row, reply in enumerate(replies):
        sampling = reply.sampling
        if sampling.temperature == 0.0:
            continue
        if sampling.min_p > 0.0:
            x[row].masked_fill_(x[row] < math.log(sampling.min_p), -math.inf)
        if 0 < sampling.top_k < x.shape[1]:
            least = x[row].topk(sampling.top_k).values[-1]
            x[row].masked_fill_(x[row] < least, -math.inf)
        if sampling.top_p < 1.0:
            _nucleus(x[row], sampling.top_p)


def _nucleus(x: Tensor, top_p: float) -> None:
    """Keep the fewest likeliest tokens whose mass reaches `top_p`, in place."""
    total = x.exp().sum(dtype=torch.float64)
    for size in (min(CANDIDATES, x.numel()), x.numel()):
        best = x.topk(size)
        mass = best.values.exp().double().cumsum(0) / total
        if mass[-1] >= top_p or size == x.numel():
            break
    kept = int((mass < top_p).sum()) + 1
    values, ids = best.values[:kept].clone(), best.indices[:kept]
    x.fill_(-math.inf)
    x[ids] = values


def _top(x: Tensor, log_total: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    if count == 0:
        return ()
    best = x.topk(min(count, x.numel()))
    values = (best.values - log_total).clamp_(max=0.0).tolist()
    return tuple(zip(best.indices.tolist(), values, strict=True))
