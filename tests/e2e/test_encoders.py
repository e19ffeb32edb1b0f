"""Images are looked at by instances of their own, and what is seen goes to who prefills: real processes."""

import contextlib
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from urllib.error import HTTPError

import httpx
import pytest

from penstock.sched.cluster.epd_profiler import FEWEST
from tests.e2e import test_hosts as hosts
from tests.e2e.test_apply import apply
from tests.e2e.test_images import ask, drawn, said
from tests.helpers import network
from tests.helpers.deployments import deployed
from tests.helpers.servers import READY
from tests.helpers.waiting import eventually
from tools.make_checkpoint import write

pytest.importorskip("transformers")
pytest.importorskip("PIL.Image")
pytestmark = pytest.mark.slow
ENGINE = {"device": "cpu", "dtype": "float32", "max-model-len": 4096, "max-num-seqs": 8}
ENGINE |= {"max-num-batched-tokens": 128, "kv-cache-memory": "64M"}
SIZES = count(0, 28)
ROLES = "encode", "prefill", "decode"
COLOURS = "red", "green", "blue", "black", "yellow", "purple"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    write("qwen2.5-vl-tiny", folder)
    return folder


def seeing(checkpoint, *roles, **top):
    instances = [{"role": role} for role in roles]
    own = {"served-model-name": "tiny", "engine": ENGINE, "instances": instances, "policy": "least_loaded"}
    return {"model": str(checkpoint)} | own | top


@pytest.fixture(scope="module")
def expected(checkpoint):
    """What a single engine answers about each of some images."""
    with deployed(seeing(checkpoint, "any")) as up:
        return {colour: said(ask(up, drawn(colour))) for colour in COLOURS}


def total(up, name, **labels):
    return int(up.metric(f"{name}_total", **labels))


def each(up, name):
    """Of every engine."""
    return {role: total(up, name, engine=f"{role}-0") for role in ROLES}


def explained(up, answer):
    """Of its sequence, as far as the master has heard."""
    return httpx.get(f"{up.url}/explain/{answer.json()['id']}", timeout=20).json()["sequences"][0]


def test_e_p_d_and_an_encoder_that_stands_still_and_is_killed(checkpoint, expected):
    with deployed(seeing(checkpoint, *ROLES)) as up:
        for colour in COLOURS[:3]:
            assert said(ask(up, drawn(colour))) == expected[colour]
        assert said(ask(up, drawn("red"), text="And now?", max_tokens=1)), "what was seen once is seen"
        eventually(lambda: each(up, "embeddings_taken") == {"encode": 0, "prefill": 3, "decode": 0}, 10, up.log)
        assert each(up, "images_encoded") == {"encode": 3, "prefill": 0, "decode": 0}
        assert total(up, "image_fallbacks") == 0

        earlier = up.kill("encode-0", signal.SIGSTOP)  # it is asked, and dies before it can answer
        answers = {}
        asks = threading.Thread(target=lambda: answers.update(black=ask(up, drawn("black"))))
        asks.start()
        eventually(lambda: up.metric("num_requests_waiting") + up.metric("num_requests_running") > 0, 20, up.log)
        up.kill("encode-0")
        asks.join()
        assert said(answers["black"]) == expected["black"]
        assert said(ask(up, drawn("yellow"))) == expected["yellow"]
        eventually(lambda: each(up, "images_encoded")["prefill"] == 2, 10, up.log)
        assert total(up, "image_fallbacks") == 1, "the other was sent to who prefills, as nobody encoded"
        assert any("prefill-0 looks at 1 of its images itself" in line for line in up.lines)
        eventually(lambda: explained(up, answers["black"])["outcome"] is not None, 10, up.log)
        told = explained(up, answers["black"])
        assert told["placements"][0]["media_route"] == "E+P+D"
        assert [(way["at"], way["how"]) for way in told["placements"][0]["images"]] == [("encode-0", "looks")]
        images, (why,) = told["outcome"]["images"], told["outcome"]["image_fallbacks"]
        assert (images["count"], images["looked"], images["brought"]) == (1, 1, 0)
        assert images["encode_ms"] > 0
        assert 0 < images["waited_ms"] < told["outcome"]["ttft_ms"]
        assert why.startswith("prefill-0 looks at 1 of its images itself: ")
        up.wait_restarted("encode-0", earlier)
        eventually(
            lambda: said(ask(up, drawn("purple", 300, 300 + next(SIZES)))) and each(up, "images_encoded")["encode"]
        )


def test_what_a_dead_engine_has_seen_is_found_again(checkpoint, expected):
    """Two engines, each of which encodes and prefills."""
    roles = [{"role": "prefill"}, {"role": "decode"}, {"role": "any", "name": "any"}]
    with deployed(seeing(checkpoint, instances=roles)) as up:
        both = "prefill-0", "any-0"

        def looked():
            return {name: total(up, "images_encoded", engine=name) for name in both}

        assert said(ask(up, drawn("red"))) == expected["red"]
        eventually(lambda: sum(looked().values()) == 1, 20, up.log)
        first = next(name for name, count in looked().items() if count)
        up.kill(first)
        salted = ask(up, drawn("red"), cache_salt="none of its KV is found")
        other = next(name for name in both if name != first)
        assert said(salted) == expected["red"]
        assert looked()[other] == 0


def test_what_a_dead_engine_of_another_host_has_seen_is_not_looked_at_again(checkpoint, expected, tmp_path):
    """Its successor has it in the files of its host, and gives it to who prefills on the other one."""
    if why := network.why_not():
        pytest.skip(why)
    content = {"model": str(checkpoint), "served-model-name": "tiny", "policy": "least_loaded"}
    content |= {"engine": ENGINE, "transport": {"kind": "tcp"}}

    def looked():
        return {name: total(up, "images_encoded", engine=name) for name in ("near-0", "far-0")}

    def both_are_ready():
        with contextlib.suppress(HTTPError):  # where nobody is
            return hosts.ready(up) == {"near-0", "far-0"}

    with network.hosts(2) as (first, second), contextlib.ExitStack() as stack:
        run = partial(hosts.begin, stack, tmp_path, {}, **content)
        up = run("up", first, host="0.0.0.0", instances=[{"name": "near", "role": "decode"}])
        up.urls = [up.wait_for(READY)[1].replace("0.0.0.0", first.address)]
        eventually(lambda: hosts.ready(up) == {"near-0"}, 90, up.log)
        for colour in COLOURS[:2]:
            assert said(ask(up, drawn(colour))) == expected[colour]
        eventually(lambda: looked()["near-0"] == 2, 20, up.log)
        hosts.kill(up, "near-0")
        join = f"join {first.address}:{hosts.PORT}"
        other = run(join, second, instances=[{"name": "far", "role": "prefill"}])
        eventually(both_are_ready, 90, other.log)
        for colour in COLOURS[:2]:
            assert said(ask(up, drawn(colour))) == expected[colour]
        eventually(lambda: total(up, "embeddings_taken", engine="far-0") == 2, 20, up.log)
        assert looked() == {"near-0": 2, "far-0": 0}, "as before"
        assert said(ask(up, drawn(COLOURS[2]))) == expected[COLOURS[2]]
        eventually(lambda: looked() == {"near-0": 2, "far-0": 1}, 20, up.log)


@pytest.mark.parametrize(
    ("route", "encodes"), [("EP+D", "prefill"), ("ED+P", "decode"), ("EPD", "prefill"), ("E+P+D", "encode")]
)
def test_every_route_says_the_same(checkpoint, expected, route, encodes):
    with deployed(seeing(checkpoint, *ROLES, **{"media-route": route})) as up:
        for colour in COLOURS:
            assert said(ask(up, drawn(colour))) == expected[colour]
        eventually(lambda: sum(each(up, "images_encoded").values()) == len(COLOURS), 10, up.log)
        assert each(up, "images_encoded")[encodes] == len(COLOURS)
        assert total(up, "image_fallbacks") == 0
        assert total(up, "handoffs") == (0 if route == "EPD" else len(COLOURS))


def test_the_route_changes_while_requests_run(checkpoint, expected, tmp_path):
    content = seeing(checkpoint, *ROLES)
    failures, over, asked = [], threading.Event(), count()

    def work(number):
        while not over.is_set():
            colour = COLOURS[next(asked) % len(COLOURS)]
            answer = ask(up, drawn(colour), cache_salt=f"{number}.{next(asked)}")
            if answer.status_code != 200 or said(answer) != expected[colour]:
                failures.append(answer.text)

    with deployed(content) as up:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: each(up, "images_encoded")["encode"], 60, up.log)
            for route, encodes in (("ED+P", "decode"), ("EP+D", "prefill")):
                code, told = apply(up, tmp_path, content | {"media-route": route})
                assert code == 0, told
                sizes = count(28, 28)
                eventually(
                    lambda encodes=encodes, sizes=sizes: (
                        ask(up, drawn("red", 280, next(sizes))) and each(up, "images_encoded")[encodes]
                    ),
                    60,
                    up.log,
                )
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert not failures


def test_the_profiler_changes_roles_once_requests_have_images():
    """Most of the engines decode, and answers are short: with images the others help."""
    asked, engine = count(), ENGINE | {"max-num-batched-tokens": 512}
    instances = [{"role": "prefill"}, {"role": "decode", "count": 3}]
    content = {"model": "demo-vl", "engine": engine, "instances": instances, "policy": "epd"}
    target = {"slo": {"ttft_ms": 2000, "tpot_ms": 60}, "max_tokens": 4, "model": "demo-vl", "logprobs": False}

    def send(up, pictures, requests=40):
        def one(number):
            sizes = [(320, 321 + (2 * number + i) % 400) for i in range(pictures)]
            answer = ask(up, *(drawn("red", *size) for size in sizes), text=f"{number}?", **target)
            assert answer.status_code == 200, answer.text
            return answer

        with ThreadPoolExecutor(4) as pool:
            return list(pool.map(one, [next(asked) for _ in range(requests)]))[-1]

    def told(up, what):
        return [line for line in up.lines if what in line]

    def changed(up):
        send(up, 2)
        return told(up, "changes to role")

    with deployed(content) as up:
        send(up, 0, 2 * FEWEST)
        assert not told(up, "changes to role")
        eventually(lambda: changed(up), 200, up.log)
        (line, *_) = told(up, "changes to role")
        assert "epd: " in line
        assert " of the latest traffic, EP+D 1:3 " in line
        answer = send(up, 1, 1)
        explained = up.get(f"/explain/{answer.json()['id']}")
        assert " of the latest traffic, EP+D 1:3 " in json.loads(explained)["sequences"][0]["placements"][0]["reason"]
