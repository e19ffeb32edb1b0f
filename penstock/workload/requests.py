"""A workload's requests, and operations on lists of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from penstock.workload.prefixes import block_ids

PRIVATE_STREAM = 1  # prefixes.SHARED_STREAM is 0: a private token stream never equals a shared one


class WorkImage(NamedTuple):
    """An image of a prompt.

    Attributes:
        number: of its content: equal ones are the same image, of as many tokens.
        tokens: of the prompt that stand for it; 0 where it is beside the prompt, and the server knows alone.
    """

    number: int
    tokens: int


class WorkRequest(Struct, frozen=True, kw_only=True, gc=False):
    """A client's request and its arrival time, without token ids.

    A prompt is the blocks named by `prefix`, `block_tokens` tokens each, and after them tokens that no other request
    has. Blocks that reach past the end of the prompt are cut there.

    Attributes:
        number: the request's place in its workload; requests of one number have the same private tokens.
        at: seconds from the start of the workload.
        prompt_tokens: at least 1.
        output_tokens: how many tokens to generate; 0 embeds the prompt.
        prefix: ids of the shared blocks in order; equal ids are equal tokens.
        block_tokens: length of each block of `prefix`; 0 when there are none.
        ttft, tpot: latency targets in seconds; inf without.
        priority: lower runs first.
        priority_only: its priority is sent to the server and its targets are not.
        offline: it uses the capacity that other requests leave.
        task: its class, in a mix of several.
        chat: the conversation that it belongs to; "" when that is not known.
        images: whose tokens are the last of the prompt, in order; at least one token of text is before them.
    """

    number: int
    at: float
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()
    block_tokens: int = 0
    ttft: float = math.inf
    tpot: float = math.inf
    priority: int = 0
    priority_only: bool = False
    offline: bool = False
    task: str = ""
    chat: str = ""
    images: tuple[WorkImage, ...] = ()

    @property
    def image_tokens(self) -> int:
        """How many of the prompt's tokens stand for images."""
        return sum([image.tokens for image in self.images])

    @property
    def prefix_tokens(self) -> int:
        """How many of the prompt's tokens lie in shared blocks."""
        return min(len(self.prefix) * self.block_tokens, self.prompt_tokens)


def safe_ids(vocab_size: int, special: Collection[int] = ()) -> npt.NDArray[np.int64]:
    """The token ids below `vocab_size` that are not special, ascending."""
    ids = np.setdiff1d(np.arange(vocab_size, dtype=np.int64), np.fromiter(special, dtype=np.int64, count=len(special)))
    assert len(ids), f"none of {vocab_size} token ids is left"
    return ids


def materialise(request: WorkRequest, seed: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The prompt's token ids, shape [prompt_tokens], drawn from `ids`.

    A function of (seed, block id) for shared blocks and of (seed, number) for the rest: the same workload and seed give
    the same tokens, another seed gives a workload of the same shape that shares nothing with it.
    """
    blocks = -(-request.prefix_tokens // request.block_tokens) if request.prefix_tokens else 0
    parts = [block_ids(seed, block, request.block_tokens, ids) for block in request.prefix[:blocks]]
    private = np.random.default_rng((seed, PRIVATE_STREAM, request.number))
    parts.append(ids[private.integers(0, len(ids), request.prompt_tokens - request.prefix_tokens)])
    return np.concatenate(parts)[: request.prompt_tokens]


def offered_rate(requests: Sequence[WorkRequest]) -> float:
    """Requests per second: gaps over the time between the first and the last arrival; inf when all come at once."""
    span = requests[-1].at - requests[0].at if requests else 0.0
    return (len(requests) - 1) / span if span > 0 else math.inf


def scale_rate(requests: Sequence[WorkRequest], factor: float) -> list[WorkRequest]:
    """The same requests, arriving `factor` times as fast."""
    return [replace(request, at=request.at / factor) for request in requests]


def between(requests: Sequence[WorkRequest], start: float, end: float = math.inf) -> list[WorkRequest]:
    """The requests that arrive in [start, end) seconds, with time counted from `start`."""
    return [replace(request, at=request.at - start) for request in requests if start <= request.at < end]


def spread_ticks(requests: Sequence[WorkRequest], tick: float, rng: np.random.Generator) -> list[WorkRequest]:
    """Each arrival moved to a random moment of the `tick` seconds that follow it; the order of the requests is kept.

    For traces with a coarse clock, whose requests would otherwise arrive in bursts at each tick.
    """
    spread = np.sort([request.at for request in requests] + rng.uniform(0.0, tick, len(requests)))
    return [replace(request, at=float(at)) for request, at in zip(requests, spread, strict=True)]


def repeat_images(requests: Sequence[WorkRequest], share: float, rng: np.random.Generator) -> list[WorkRequest]:
    """The requests with such a share of their images, in the mean, each replaced by one that came before, whose tokens
    it has then; all that came are equally likely."""
    known: list[WorkImage] = []
    repeated = []
    for request in requests:
        images = []
        for own in request.images:
            if known and rng.random() < share:
                images.append(known[int(rng.integers(len(known)))])
            else:
                known.append(own)
                images.append(own)
        text = request.prompt_tokens - request.image_tokens
        tokens = text + sum([image.tokens for image in images])
        repeated.append(replace(request, prompt_tokens=tokens, images=tuple(images)))
    return repeated


def limit_context(requests: Sequence[WorkRequest], limit: int) -> tuple[list[WorkRequest], int]:
    """The requests made to fit a model whose prompt and output together take at most `limit` tokens (at least 2).

    Returns them and how many had to be cut. Prompt and output are cut in proportion, so that a prompt-heavy request
    stays prompt-heavy. Images are never cut: the last that do not fit are left out.
    """
    assert limit >= 2, f"limit {limit} has no room for a prompt and an output"
    fitting = [_fit(request, limit) for request in requests]
    return fitting, sum(new is not old for new, old in zip(fitting, requests, strict=True))


def _fit(request: WorkRequest, limit: int) -> WorkRequest:
    total = request.prompt_tokens + request.output_tokens
    if total <= limit:
        return request
    output = max(1, request.output_tokens * limit // total) if request.output_tokens else 0
    images = request.images
    while images and sum([image.tokens for image in images]) >= limit - output:
        images = images[:-1]
    return replace(request, prompt_tokens=limit - output, output_tokens=output, images=images)


def unrelated(requests: Sequence[WorkRequest], count: int) -> list[WorkRequest]:
    """`count` requests of the same lengths, all at 0 s, that share no prefix or image with `requests` or each other, to
    warm up."""
    beyond = max(request.number for request in requests) + 1
    unseen = itertools.count(max((image.number for request in requests for image in request.images), default=-1) + 1)
    chosen = [requests[i % len(requests)] for i in range(count)]
    return [
        replace(
            request,
            number=beyond + i,
            at=0.0,
            prefix=(),
            block_tokens=0,
            images=tuple(WorkImage(next(unseen), image.tokens) for image in request.images),
        )
        for i, request in enumerate(chosen)
    ]


def reusable_tokens(requests: Iterable[WorkRequest]) -> int:
    """Prompt tokens that a prefix cache without limits would not have to compute.

    Requests are taken in order; a block can be reused when it and every block before it in the same prompt were in an
    earlier prompt, which is reusable from the moment it arrives. An upper bound for any real cache.
    """
    paths: dict[tuple[int, int], int] = {}  # (path so far, block) -> path
    reusable = 0
    for request in requests:
        path, hit, left = 0, True, request.prefix_tokens
        for block in request.prefix:
            if left <= 0:
                break
            known = paths.get((path, block))
            hit = hit and known is not None
            path = paths.setdefault((path, block), len(paths) + 1) if known is None else known
            reusable += min(request.block_tokens, left) if hit else 0
            left -= request.block_tokens
    return reusable


def follow_chats(requests: Sequence[WorkRequest], least_blocks: int) -> list[WorkRequest]:
    """The same requests with chats inferred from their prefixes, for traces without chat ids.

    The next turn of a chat repeats the last one's prompt, so a request belongs to the chat whose newest prompt, without
    its last (perhaps partial) block, is the longest prefix of its own. Others begin a chat.

    Args:
        requests: in order of arrival.
        least_blocks: that both must share; fewer may be a prefix common to all chats.
    """
    newest: dict[tuple[int, ...], str] = {}  # a prompt's blocks but the last -> its chat
    followed = []
    for request in requests:
        blocks = request.prefix
        beginnings = (blocks[:length] for length in range(len(blocks), least_blocks - 1, -1))
        last = next((beginning for beginning in beginnings if beginning in newest), None)
        chat = f"chat-{request.number}" if last is None else newest.pop(last)
        newest[blocks[:-1]] = chat
        followed.append(replace(request, chat=chat))
    return followed
