"""The tiers of one cache below real engines: what one server computed the next one finds, and what becomes of a tier
costs nothing but time."""

import json
import os
import random
import shutil
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from penstock.cli.main import main
from penstock.transfer import mooncake_store
from tests.helpers import stores
from tests.helpers.deployments import DEMO, PACED, colocated, deployed
from tests.helpers.servers import QUICK, serving
from tests.helpers.waiting import eventually

pytest.importorskip("xxhash")
NEEDS_MOONCAKE = pytest.mark.skipif(bool(mooncake_store.missing()), reason=mooncake_store.missing())
PLACES = {"file": stores.directory, "mooncake": stores.mooncake}
LENGTH, FULL = 1000, 15 * 64  # tokens of a prompt, and those of them in full blocks
# what may write wherever it likes would not notice that it may not
ENTER = () if os.geteuid() else ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


def prompt_of(number, length=LENGTH):
    rng = random.Random(number)
    return [rng.randrange(3, 900) for _ in range(length)]


class Asked:
    """Of one server, prompts by number.

    Attributes:
        cached: of all prompts so far.
    """

    def __init__(self, server):
        self.server, self.cached = server, 0
        self._lock = threading.Lock()

    def __call__(self, number, length=LENGTH, max_tokens=40, more=()):
        """(text, how much of the prompt was found)"""
        prompt = [*prompt_of(number, length), *more]
        body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        answer = httpx.post(self.server.url + "/v1/completions", json=body | {"ignore_eos": True}, timeout=60)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        with self._lock:
            self.cached += cached
        return answer.json()["choices"][0]["text"], cached

    def hits(self, tier):
        return self.server.metric("kv_hit_tokens_total", tier=tier)

    def failures(self, reason=None):
        labels = {} if reason is None else {"reason": reason}
        return self.server.metric("kv_tier_failures_total", tier="remote", **labels)

    def put(self):
        """Bytes, in the store."""
        return self.server.metric("kv_bytes_moved_total", to="remote")


@pytest.fixture(params=["file", pytest.param("mooncake", marks=NEEDS_MOONCAKE)])
def place(request, tmp_path):
    with PLACES[request.param](tmp_path / "shared") as place:
        yield place


@pytest.mark.slow
@pytest.mark.skipif(bool(ENTER) and shutil.which("setpriv") is None, reason="there is no setpriv (util-linux)")
def test_servers_share_a_store_whatever_becomes_of_it(place, tmp_path):
    """Two engines of a deployment, and after that has ended a server that finds all of it at once."""
    texts = {}
    engine = DEMO | {"remote-cache": place.url}
    with deployed(colocated(2, engine=engine, policy="round_robin", seed=1)) as up:
        ask, found = Asked(up), []
        for number in range(10):
            before = ask.put()
            texts[number], cached = ask(number)
            assert cached == 0
            eventually(lambda before=before: ask.put() > before, what=up.log)
            again, cached = ask(number)  # the other engine
            assert again == texts[number]
            found.append(cached)
        assert any(found)
        eventually(lambda: ask.hits("remote") == sum(found) == ask.cached)
        assert up.stop() == 0
    with serving("demo", *QUICK, "--dtype", "float32", "--remote-cache", place.url, enter=ENTER) as server:
        ask = Asked(server)
        found = [ask(number) for number in range(3)]
        assert [text for text, _ in found] == [texts[number] for number in range(3)]
        assert any(cached for _, cached in found)
        eventually(lambda: ask.hits("remote") == ask.cached)
        is_left_alone(ask, place, texts)
        if place.url.startswith("file:"):
            assert any(ask(number)[1] for number in (5, 6)), server.log()
            is_read_only(ask, tmp_path / "shared", texts)
        assert server.stop() == 0
        assert not any("Traceback" in line for line in server.lines)


def is_left_alone(ask, place, texts):
    """While it does not answer, and used as soon as it does."""
    before = ask.failures()
    place.stop()
    for number in (3, 4):
        assert ask(number) == (texts[number], 0)
    eventually(lambda: ask.failures() > before, what=ask.server.log)
    place.go_on()
    before, numbers = ask.put(), iter(range(100, 1000))
    eventually(lambda: ask(next(numbers), 130, 4) and ask.put() > before, 90, ask.server.log)


def is_read_only(ask, folder, texts):
    """Nothing is put there, and what is there is found as before."""
    kept = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *Path(folder).rglob("*")) if path.is_dir()}
    for path in kept:
        path.chmod(0o500)
    try:
        before = ask.failures("store")
        ask(20)
        eventually(lambda: ask.failures("store") > before, what=ask.server.log)
        found = [ask(number) for number in (7, 8, 9)]
        assert [text for text, _ in found] == [texts[number] for number in (7, 8, 9)]
        assert any(cached for _, cached in found)
    finally:
        for path, mode in kept.items():
            path.chmod(mode)


# slower than the host's memory, one after the other, and quick enough to be worth it for a device that is that quick
SPEEDS = {"disk-cache-gbps": 300, "remote-cache-gbps": 200}
BLOCK = 64 * 147456  # bytes of qwen3-8b's KV


@pytest.mark.slow
def test_hits_are_told_by_tier_where_all_tiers_are_on(tmp_path, capsys, monkeypatch):
    """Of the device, the host's memory, a disk, a store and a peer: each prompt token that was found is of one of them,
    and a cache without end is counted beside them."""
    monkeypatch.delenv("PENSTOCK_FLIGHT_RECORDER", raising=False)
    sizes = {"max-model-len": 2048, "kv-blocks": 40, "host-cache-memory": 100 * BLOCK, "disk-cache-size": 1000 * BLOCK}
    engine = PACED | SPEEDS | sizes | {"remote-cache": f"file://{tmp_path}?timeout=20", "max-num-seqs": 4}
    with deployed(colocated(1, engine=engine)) as up:
        ask = Asked(up)
        texts = {number: ask(number)[0] for number in range(6)}
        assert ask.put() > 40 * BLOCK
    with deployed(colocated(2, engine=engine, policy="unified", seed=1)) as up:
        ask, ideal, fresh = Asked(up), -6 * FULL, iter(range(50, 1000))

        def is_found(tier):
            """All of them, after others or none; for the first time in this deployment, an ideal cache had not."""
            nonlocal ideal
            for number in range(6):
                assert ask(number)[0] == texts[number]
            ideal += 6 * FULL
            return ask.hits(tier)

        def push_out():
            return [ask(next(fresh), max_tokens=1) for _ in range(6)]

        assert is_found("remote"), up.log()
        eventually(lambda: is_found("host"), 90, up.log)
        eventually(lambda: push_out() and is_found("disk"), 90, up.log)

        def is_brought_from_a_peer():
            """Where more come at once than the engine takes that has their beginning, which is hardly in the store."""
            nonlocal ideal
            beginning = next(fresh)
            ask(beginning, max_tokens=1)
            with ThreadPoolExecutor(12) as pool:
                list(pool.map(lambda last: ask(beginning, more=(last,)), range(3, 15)))
            ideal += 12 * FULL
            return ask.hits("peer")

        eventually(is_brought_from_a_peer, 90, up.log)
        tiers = ("device", "host", "disk", "remote", "peer")
        eventually(
            lambda: sum(map(ask.hits, tiers)) == ask.cached, what=lambda: f"{ask.cached}, {[*map(ask.hits, tiers)]}"
        )
        hits = {tier: ask.hits(tier) for tier in tiers}
        assert all(hits.values()), hits
        assert up.metric("prefix_cache_hits_total") == ask.cached
        eventually(lambda: up.metric("prefix_ideal_hits_total") == ideal, what=lambda: f"{ideal}")
        assert up.metric("prefix_ideal_is_lower_bound") == 1, "there is a store, with what came before"
        assert main(["top", "--url", up.url, "--json"]) == 0
        seen = json.loads(capsys.readouterr().out)
        assert seen["frontend"]["prefixes"]["found_tokens"] == hits
        assert (seen["master"]["prefixes"]["ideal_tokens"], seen["master"]["prefixes"]["complete"]) == (ideal, False)
