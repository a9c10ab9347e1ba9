"""What the double says: a vocabulary of bytes and words, and replies made of it."""

from __future__ import annotations

import codecs
import random
from collections.abc import Sequence

from online_sao.types import Sampling, TokenText, TopLogprob

TURN, END = 256, 257
FIRST_WORD = 258
_TEXT = """
the a of to and in is it that for you was on are with as be this have from or had by hot word
but what some we can out other were all there when up use your how said an each she which do
their time if will way about many then them write would like so these her long make thing see
him two has look more day could go come did number sound no most people my over know water than
call first who may down side been now find any new work part take get place made live where
after back little only round man year came show every good me give our under name very through
just form sentence great think say help low line differ turn cause much mean before move right
boy old too same tell does set three want air well also play small end put home read hand port
large spell add even land here must big high such follow act why ask men change went light kind
off need house picture try us again animal point mother world near build self earth father head
stand own page should country found answer school grow study still learn
"""
WORDS = tuple(_TEXT.split())
VOCABULARY = FIRST_WORD + len(WORDS)
SHORTEST, LONGEST = 5, 70
"""Words in a made-up reply: on both sides of what a rubric on length may allow."""


def encode(text: str) -> list[int]:
    """One id per UTF-8 byte."""
    return list(text.encode("utf-8", errors="surrogatepass"))


class Spelling:
    """The text of a reply's tokens, one after the other; bytes wait until a character is whole."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """What this token completes; markers have no text."""
        if token_id < TURN:
            return self._decoder.decode(bytes([token_id]))
        return "" if token_id < FIRST_WORD else " " + WORDS[token_id - FIRST_WORD]


def make_reply(
    prompt: Sequence[int], sampling: Sampling, *, turn: int, scripted: str | None
) -> list[tuple[int, float]]:
    """Tokens with log-probabilities, `END` last.

    At temperature 0 by the prompt alone; else by the seed too, or by `turn` where there is none.
    """
    seed = "greedy"
    if sampling.temperature > 0:
        seed = f"{sampling.temperature} {turn if sampling.seed is None else sampling.seed}"
    rng = random.Random(f"{seed} {list(prompt)}")
    if scripted is not None:
        ids = encode(scripted)
    else:
        count = rng.randint(SHORTEST, LONGEST)
        ids = [rng.randrange(FIRST_WORD, VOCABULARY) for _ in range(count)]
    return [(token, -rng.expovariate(1.0) - 1e-3) for token in [*ids, END]]


def token_shown(token: int, logprob: float, top: int) -> TokenText:
    """A token as a client sees it, with `top` made-up alternatives."""
    shown, raw = ("<end>", b"<end>") if token == END else (Spelling().push(token), None)
    if token < TURN:
        raw = bytes([token])
    others = tuple(
        TopLogprob(word, logprob - rank, tuple(word.encode()))
        for rank, word in enumerate((shown, *(" " + w for w in WORDS[:20])))
    )
    return TokenText(shown, tuple(shown.encode() if raw is None else raw), others[:top])
