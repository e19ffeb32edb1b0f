"""Every way by which weights come from a running engine, with engines' processes: the same bits, and the next source
where one fails."""

import contextlib
import gc
import os
import threading
from itertools import count
from typing import get_args

import pytest
import torch

from penstock.core.wire.weights import PairWay, Way
from penstock.engine.weights import Source, WeightManager
from penstock.nn.image import DeviceImage, parts
from penstock.nn.loader import load
from penstock.transfer import pair
from penstock.transfer import weights as wire
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import Collector, make_engine, make_request
from tests.helpers.links import NEEDS_MOONCAKE
from tests.helpers.waiting import eventually
from tests.helpers.weight_giver import SECRET, be_another_host, givers, make_small

GPUS = torch.cuda.device_count()
NEEDS_GPU = pytest.mark.skipif(not GPUS, reason="needs a GPU")
MARKS = {"mooncake": [NEEDS_MOONCAKE], "nccl": [NEEDS_GPU]}
PAIR_WAYS = get_args(PairWay)
WAYS = [pytest.param(way, marks=MARKS.get(way, [])) for part in get_args(Way) for way in get_args(part) or [part]]
PAIRS = [way for way in WAYS if way.values[0] in PAIR_WAYS]  # of the others tests/engine/test_weights.py has more
SENT = [way for way in WAYS if way.values[0] not in ("map", "mooncake")]  # block by block, by who gives


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    make_small(monkeypatch)
    if GPUS == 1:
        be_another_host(monkeypatch, "receiver")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", dtype=torch.bfloat16)


@pytest.fixture
def start(checkpoint, tmp_path):
    """Makes engines' processes that give weights by a way, and says how they are asked: by their names."""
    numbers = count()
    with contextlib.ExitStack() as stack:

        def processes(way, maps=True, **happens):
            told = {"checkpoint": str(checkpoint), "secret": SECRET, "maps": maps}
            told |= {"pair": way} if way in PAIR_WAYS else {"mooncake": "127.0.0.1"} if way == "mooncake" else {}
            told |= {"device": "cuda:0"} if way == "nccl" else {}
            each = [{**told, "address": f"{tmp_path}/{next(numbers)}", "happens": what} for what in happens.values()]
            addresses = stack.enter_context(givers(*each))
            return [Source(name, address[way != "map"]) for name, address in zip(happens, addresses, strict=True)]

        yield processes


def ask(checkpoint, way, *sources, secret=SECRET, maps=True):
    """Load a model; its manager has nothing to give. Returns what was loaded."""
    mooncake, by = "127.0.0.1" if way == "mooncake" else "", way if way in PAIR_WAYS else ""
    manager = WeightManager([], sources, secret, None, mooncake, pair=by)
    manager.place = place(way)
    if not maps:
        manager.__class__ = OnDevice
    return load(checkpoint, manager.place, peers=manager)


class OnDevice(WeightManager):
    maps = False


def place(way):
    return torch.device(f"cuda:{GPUS - 1}" if way == "nccl" else "cpu")


def same(ours, theirs):
    mine, others = parts(ours), parts(theirs)
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_bits(way, checkpoint, start):
    loaded = ask(checkpoint, way, *start(way, first=""))
    assert (loaded.source, loaded.image.giver, loaded.image.way) == (way, "first", way)
    assert same(loaded.model, load(checkpoint, place(way)).model)


@pytest.mark.parametrize("way", WAYS)
def test_a_tensor_that_has_changed_is_noticed_and_the_next_source_taken(way, checkpoint, start, caplog):
    loaded = ask(checkpoint, way, *start(way, bad="damaged", good=""))
    assert (loaded.source, loaded.image.giver) == (way, "good")
    assert "weights do not come from bad" in caplog.text
    assert "others are asked: block " in caplog.text
    assert "is corrupt" in caplog.text
    assert same(loaded.model, load(checkpoint, place(way)).model)


@pytest.mark.parametrize("happens", ["dies", pytest.param("stops", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", SENT)
def test_a_source_that_fails_in_the_middle_is_left_for_the_next(way, happens, checkpoint, start, caplog, monkeypatch):
    if happens == "stops":
        monkeypatch.setattr(wire, "PATIENCE", 1.0)
        monkeypatch.setattr(pair, "PATIENCE", 1.0)
        monkeypatch.setattr(pair, "BEGIN", 5.0)
    loaded = ask(checkpoint, way, *start(way, one=happens, two=""))
    assert (loaded.source, loaded.image.giver) == (way, "two")
    assert "weights do not come from one" in caplog.text
    assert same(loaded.model, load(checkpoint, place(way)).model)


@pytest.mark.parametrize("way", PAIRS)
def test_all_sources_fail(way, checkpoint, start):
    sources = Source("dead", "tcp:127.0.0.1:1"), *start(way, bad="damaged")
    assert ask(checkpoint, way, *sources).source == "checkpoint"


@pytest.mark.parametrize("way", PAIRS)
def test_who_does_not_know_the_secret_gets_none(way, checkpoint, start, monkeypatch):
    monkeypatch.setattr(wire, "PATIENCE", 0.5)
    assert ask(checkpoint, way, *start(way, first=""), secret="another").source == "checkpoint"


class TestAPair:
    """torch.distributed, between CPUs: all but what it is to a device is the same by NCCL."""

    def test_weights_that_are_in_no_file(self, checkpoint, start, caplog):
        """As on a GPU: each in memory of its own where they were loaded, in one where they have come."""
        sources = start("gloo", maps=False, bad="damaged", gone="dies", good="")
        loaded = ask(checkpoint, "gloo", *sources, maps=False)
        assert (loaded.source, loaded.image.giver, type(loaded.image)) == ("gloo", "good", DeviceImage)
        for name in ("bad", "gone"):
            assert f"weights do not come from {name} by gloo" in caplog.text
        expected = load(checkpoint, torch.device("cpu")).model
        assert same(loaded.model, expected)
        memory = loaded.image.memory[0][1]
        places = {tensor.untyped_storage().data_ptr() for tensor in loaded.model.parameters()}
        assert places == {memory.untyped_storage().data_ptr()}, "they are where they came to"
        again = ask(checkpoint, "gloo", *start("gloo", file=""), maps=False)
        assert again.source == "gloo", "how they lie at who gives them is nothing to who gets them"
        tokens = [Collector(make_engine(model)).run(make_request("a", [1, 2, 3])) for model in (loaded.model, expected)]
        assert tokens[0] == tokens[1]

    def test_who_gets_them_gives_them_and_computes_meanwhile(self, checkpoint, tmp_path):
        first = WeightManager(["tcp:127.0.0.1:0"], (), SECRET, pair="gloo")
        loaded = load(checkpoint, torch.device("cpu"), peers=first)
        first.give(loaded.image)
        source, engine = Source("first", first.serve(None)), Collector(make_engine(loaded.model))
        second = WeightManager(["tcp:127.0.0.1:0"], [source], SECRET, pair="gloo")
        tokens, got = [], []

        def get():
            got.append(load(checkpoint, torch.device("cpu"), peers=second))
            second.give(got[0].image)

        getting = threading.Thread(target=get)
        getting.start()
        while getting.is_alive() or not tokens:
            tokens.append(engine.run(make_request(f"{len(tokens)}", [1, 2, 3]))[f"{len(tokens)}"])
        getting.join()
        assert all(each == tokens[0] for each in tokens)
        last = ask(checkpoint, "gloo", Source("second", second.serve(None)))
        assert (got[0].image.giver, last.image.giver) == ("first", "second")
        assert same(last.model, loaded.model)
        for manager in (first, second):
            manager.close()

    def test_what_nobody_can_give_is_refused_by_name(self, checkpoint, monkeypatch, caplog):
        manager = WeightManager(["tcp:127.0.0.1:0"], (), SECRET)
        manager.give(load(checkpoint, torch.device("cpu"), peers=manager).image)
        source = Source("plain", manager.serve(None))
        assert ask(checkpoint, "gloo", source).source == "tcp"
        assert "weights do not come from plain by gloo, others are asked: it gives no weights by gloo" in caplog.text
        manager._server._pair = "nccl"
        ask(checkpoint, "gloo", source)
        assert "it gives weights by nccl" in caplog.text
        manager._server._pair = "gloo"
        offer = next(iter(manager._offers.values()))
        offer.gpu = "GPU-1"
        monkeypatch.setattr(pair, "gpu_of", lambda _: "GPU-1")
        ask(checkpoint, "gloo", source, maps=False)
        assert "both are on one GPU" in caplog.text
        manager.close()

    def test_what_was_lent_is_given_back_before_a_device_has_other_use_for_it(self, checkpoint):
        manager = WeightManager(["tcp:127.0.0.1:0"], (), SECRET, pair="gloo")
        manager.__class__ = OnDevice
        manager.give(load(checkpoint, torch.device("cpu"), peers=manager).image)
        (offer,) = manager._offers.values()
        entered, closing = threading.Event(), threading.Thread(target=manager.give, args=(None,))

        def lend():
            with offer.lending() as block:
                entered.set()
                with contextlib.suppress(Exception):
                    while True:
                        block(0, 1)

        threading.Thread(target=lend).start()
        assert entered.wait(20)
        closing.start()
        closing.join(20)
        assert not offer._lent
        manager.close()

    def test_nothing_is_left_behind(self, checkpoint, start, monkeypatch):
        def held():
            gc.collect()
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), threading.active_count()

        # pytest keeps what is logged, with errors, and they keep what they are of
        monkeypatch.setattr("penstock.engine.weights.log.disabled", True)
        sources = start("gloo", bad="damaged", good="")
        own = WeightManager(["tcp:127.0.0.1:0"], (), SECRET, pair="gloo")
        own.give(load(checkpoint, torch.device("cpu"), peers=own).image)
        here = Source("here", own.serve(None))
        eventually(lambda: next(iter(own._offers.values())).image.digests)
        ask(checkpoint, "gloo", here)  # what is made once
        eventually(lambda: not own._server._links)
        before = held()
        for _ in range(3):
            ask(checkpoint, "gloo", *sources)
            ask(checkpoint, "gloo", here)
        eventually(
            lambda: all(now <= then for now, then in zip(held(), before, strict=True)),
            20,
            lambda: f"{held()}, before {before}",
        )
        own.close()
