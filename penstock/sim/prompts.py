"""Tokens of simulated requests: placeholders, of which only matters which are equal.

Every token of a shared block is that block's id, every other token of a prompt and an output is the request's own. So
two prompts begin alike exactly as far as they share blocks.
"""

from __future__ import annotations

from penstock.workload.requests import WorkRequest

FIRST_OWN = 1 << 30
STOP = (1 << 32) - 1  # ends an output


def own_token(number: int) -> int:
    """Of the request with that number."""
    return FIRST_OWN + number


def prompt_of(work: WorkRequest) -> list[int]:
    """Token ids, as many as the prompt has."""
    tokens: list[int] = []
    blocks = -(-work.prefix_tokens // work.block_tokens) if work.prefix_tokens else 0
    for block in work.prefix[:blocks]:
        assert 0 <= block < FIRST_OWN
        tokens += [block] * work.block_tokens
    del tokens[work.prompt_tokens :]
    return tokens + [own_token(work.number)] * (work.prompt_tokens - len(tokens))
