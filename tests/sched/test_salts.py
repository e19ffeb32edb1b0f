"""Whose prefixes are shared, on whichever tier they lie: requests with the same salt, and no others."""

from dataclasses import replace

import pytest

from penstock.core.plan import BLOCK_TOKENS
from penstock.core.wire.engine import CacheDelta
from penstock.kv.ideal import IdealCache
from penstock.kv.index import ClusterIndex
from penstock.kv.keys import extend_keys, salted
from tests.sched.test_scheduler import expected, make, request, run

PROMPT = [1] * 250  # three full blocks and a rest
BLOCKS = len(PROMPT) // BLOCK_TOKENS
OWNERS = ["", "a", "b"]  # salts, or tenants: who has an API key of its own has a salt of its own


def keys_of(root, salt):
    keys = []
    extend_keys(keys, salted(root, salt), PROMPT, BLOCKS)
    return keys


@pytest.mark.parametrize("tiers", [{}, {"slots": 64}, {"on_disk": 64}, {"slots": 64, "on_disk": 64}], ids=str)
def test_a_prompt_under_another_salt_is_found_nowhere(tiers):
    """Neither on the device nor, once it was evicted there, below it; and nothing is loaded, which would take time."""
    engine = make(num_blocks=7, budget=400, sequences=4, model_len=440, **tiers)
    index, ideal = ClusterIndex(), IdealCache()
    cached = {}

    def ask(name, salt, prompt=PROMPT):
        engine.scheduler.add(replace(request(name, prompt, 1), cache_salt=salt))
        run(engine)
        assert engine.out[name] == expected(prompt, 1), "a salt changes no token"
        cached[name] = len(prompt) - engine.computed[name]

    for salt in OWNERS:
        before = engine.scheduler.counters.prefix_hits
        ask(f"first {salt}", salt)
        assert engine.scheduler.counters.prefix_hits == before
        assert ideal.ask(keys_of(engine.scheduler.root, salt), len(PROMPT)) == 0
    for number in range(3 if tiers else 0):  # they go from the device
        ask(f"other {number}", "", [100 + number] * 250)
    for sequence, lane in enumerate(engine.scheduler.offload.lanes if tiers else ()):
        index.apply("e", CacheDelta(1, sequence, lane.tier.keys(), [], lane.name, whole=True))
    for salt in OWNERS if tiers else OWNERS[-1:]:
        ask(f"again {salt}", salt)
        assert cached[f"again {salt}"] == (BLOCKS * BLOCK_TOKENS if tiers else 248)  # the rest is on the device alone
    assert not any(tokens for name, tokens in cached.items() if not name.startswith("again"))
    for salt in (*OWNERS, "c"):
        found = index.match(keys_of(engine.scheduler.root, salt))
        assert found == ({"e": BLOCKS} if tiers and salt in OWNERS else {})
        assert ideal.ask(keys_of(engine.scheduler.root, salt), len(PROMPT)) == (192 if salt in OWNERS else 0)
