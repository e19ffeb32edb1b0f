"""Conversations over instances that prefill and instances that decode: the next turn finds what the last one left,
its answer included, wherever that is."""

import asyncio
import random

import httpx
import pytest

from penstock.core.plan import BLOCK_TOKENS
from tests.helpers.deployments import DEMO, deployed, disaggregated

WORDS = ["import os", "def", "return", "class", "with open", "yield", "while", "break", "lambda", "assert", "raise"]
ENOUGH = 0.9  # of the ideal
LASTING = 110  # tokens of an answer that is worth handing over to an instance that decodes


class Talk:
    """One conversation.

    Attributes:
        ideal, cached: prompt tokens from the second turn on: full blocks that earlier turns had, and what was reused.
        answers: of these, those that were part of an answer.
    """

    def __init__(self, number, keyed):
        self.number, self.keyed = number, keyed
        self.ideal = self.cached = self.answers = 0

    async def run(self, client, turns, tokens):
        rng, said, before, prompt_before = random.Random(self.number), [], [], 0
        more = {"prompt_cache_key": f"talk-{self.number}"} if self.keyed else {}
        for turn in range(turns):
            question = " ".join([f"talk {self.number}", *rng.choices(WORDS, k=60)])
            said.append({"role": "user", "content": question})
            body = {"model": "demo", "messages": said, "max_tokens": tokens, "ignore_eos": True, "seed": turn}
            answer = await client.post("/v1/chat/completions", json=body | more | {"return_token_ids": True})
            assert answer.status_code == 200, answer.text
            answer = answer.json()
            choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
            if turn:
                self._count(prompt, before, prompt_before, answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            before, prompt_before = prompt + choice["token_ids"][:-1], len(prompt)  # nobody has computed the last
            said.append({"role": "assistant", "content": choice["message"]["content"]})

    def _count(self, prompt, before, prompt_before, cached):
        same = next((i for i, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), len(before))
        ideal = min(same, len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        self.ideal, self.cached = self.ideal + ideal, self.cached + min(cached, ideal)
        self.answers += max(0, ideal - prompt_before // BLOCK_TOKENS * BLOCK_TOKENS)


async def hold(url, talks, turns, tokens):
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(talk.run(client, turns, tokens) for talk in talks))


def reused(kind, count, turns, engine=DEMO):
    """What share of the ideal is reused, by conversations that are named and by others, half of each."""
    with deployed(disaggregated(2, 2, kind, policy="unified", engine=engine)) as up:
        talks = [Talk(number, keyed=number % 2 == 0) for number in range(count)]
        asyncio.run(hold(up.url, talks, turns, LASTING))
        handed_over = up.metric("handoffs_total")
        assert up.stop() == 0
        assert not any("Traceback" in line for line in up.lines), up.log()
    assert handed_over > 0, "nothing was handed over"
    assert sum(talk.answers for talk in talks) > 0, "no answer had a full block: the test says nothing"
    for keyed in (True, False):
        some = [talk for talk in talks if talk.keyed == keyed]
        share = sum(talk.cached for talk in some) / sum(talk.ideal for talk in some)
        print(f"{kind}, {'named' if keyed else 'not named'}: {share:.3f} of the ideal")
        assert share >= ENOUGH, up.log()


@pytest.mark.slow  # whether any answer is worth handing over is up to how busy the machine is
@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_a_turn_finds_what_the_last_one_left(kind):
    reused(kind, count=4, turns=4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared", "tcp"])
def test_fifty_conversations_of_eight_turns(kind):
    reused(kind, count=50, turns=8, engine=DEMO | {"kv-cache-memory": "256M"})
