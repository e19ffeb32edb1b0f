"""The modelled model: what a paced engine computes in place of a neural network, defined one token at a time.

Its KV is one 64-bit digest per token. As with attention, everything a token is depends on all tokens before it:

    context(p)  = sum over j < p of weight(j) * digest(j)         mod 2**64
    digest(p)   = FEEDBACK * context(p) + spread(token at p)      mod 2**64

and the token at position p is sampled from context(p), from p, and from the seed unless the draw is greedy. Weights are
odd, so one wrong digest anywhere always changes the context, by an amount that depends on where it stands: a block
that is stale, missing, another's, or in another's place changes every token from there on (each by chance remains the
same once in a vocabulary). FEEDBACK is even, so context(p + 1) = (1 + weight(p) * FEEDBACK) * context(p) + weight(p) *
spread(token at p) has an odd factor and can be undone: an error never vanishes, and a whole chunk can be computed
at once with tables of products, which is what `engine.modelled` does. This file is the definition; that one has to
agree with it to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.request import FinishReason

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd: multiples of it are spread evenly
FEEDBACK = 2 * GOLDEN & MASK
EMBEDDING = 16  # numbers
SPREAD, OFFSETS, BLOCKS, SEEDS = (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89)
EMBEDDINGS = 0x452821E638D01377


def mix(value: int) -> int:
    """A bijection of 64 bits without visible structure (the finaliser of SplitMix64)."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=1 << 18)
def spread(token: int) -> int:
    """64 bits that stand for a token."""
    return mix((SPREAD + token) & MASK)


@lru_cache(maxsize=1 << 16)
def block_weight(index: int) -> int:
    """Of the block that holds positions [index * BLOCK_TOKENS, ...); a position's weight is this times its offset's."""
    return mix(BLOCKS + index) | 1


OFFSET_WEIGHTS = tuple(mix(OFFSETS + offset) | 1 for offset in range(BLOCK_TOKENS))


class ModelledSequence:
    """A sequence of the modelled model, computed from its start.

    Attributes:
        position: how many tokens it has.
        context: of the next token.
    """

    __slots__ = ("context", "position")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.position = 0
        self.context = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> list[int]:
        """Append tokens; returns their digests."""
        position, context, block = self.position, self.context, block_weight(self.position // BLOCK_TOKENS)
        digests = []
        for token in tokens:
            offset = position % BLOCK_TOKENS
            if not offset:
                block = block_weight(position // BLOCK_TOKENS)
            digest = (FEEDBACK * context + spread(token)) & MASK
            context = (context + block * OFFSET_WEIGHTS[offset] * digest) & MASK
            position += 1
            digests.append(digest)
        self.position, self.context = position, context
        return digests

    def next_token(self, token_ids: range, seed: int | None = None) -> int:
        """See `sample`."""
        return sample(self.context, self.position, token_ids, seed)


def sample(context: int, position: int, token_ids: range, seed: int | None = None) -> int:
    """The token at `position`.

    Args:
        context: of all digests before it.
        token_ids: the ids that may be sampled; ordinary ones, so that no text ends or changes shape by chance.
        seed: of the request; None is greedy.
    """
    noise = 0 if seed is None else mix((SEEDS + seed) & MASK)
    return token_ids[mix((context + GOLDEN * position + noise) & MASK) * len(token_ids) >> 64]


def embedding(context: int) -> list[float]:
    """[EMBEDDING] in [-1, 1), of a prompt after whose last token this is the context, whatever the pooling."""
    return [mix((context + EMBEDDINGS * (i + 1)) & MASK) / 2**63 - 1.0 for i in range(EMBEDDING)]


def offline(
    prompt: Sequence[int],
    *,
    max_tokens: int,
    token_ids: range,
    seed: int | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> tuple[list[int], FinishReason]:
    """The whole output for a prompt, and its finish reason: the reference for engines of modelled devices.

    Args:
        prompt: token ids, at least one.
        max_tokens: as in `Request`: at least 1, already cut to the model's length.
        token_ids, seed: as in `sample`.
        stop_ids: tokens that end the output; the one that does is its last.
    """
    sequence = ModelledSequence(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        token = sequence.next_token(token_ids, seed)
        output.append(token)
        if token in stop_ids:
            return output, FinishReason.STOP
        sequence.extend((token,))
    return output, FinishReason.LENGTH
