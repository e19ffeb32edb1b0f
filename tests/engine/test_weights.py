"""Weights from a running engine: the same bits by every way, and on to the next source when one of them fails."""

import contextlib
import gc
import json
import logging
import os
import re
import socket
import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from penstock.core.clock import SystemClock
from penstock.core.device import DeviceModel
from penstock.core.errors import ConfigError, Unavailable
from penstock.core.wire.rank import WeightSources
from penstock.engine import worker
from penstock.engine.build import EngineOptions, build_engine
from penstock.engine.weights import Neighbours, Source, WeightManager, passed
from penstock.nn import native
from penstock.nn.identity import image_key
from penstock.nn.image import parts
from penstock.nn.loader import held, load
from penstock.nn.methods import METHODS
from penstock.nn.weight_cache import WeightCache
from penstock.transfer import weights as wire
from penstock.transfer.weights import ask_to_map
from tests.helpers.certificates import NEEDS_OPENSSL, certificate
from tests.helpers.checkpoints import edit, write_checkpoint
from tests.helpers.deployments import colocated, deployed
from tests.helpers.engines import Collector, make_engine, make_request
from tests.helpers.links import NEEDS_MOONCAKE
from tests.helpers.waiting import eventually
from tests.helpers.weight_giver import BLOCK, SECRET, make_small

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", dtype=torch.bfloat16)


@pytest.fixture
def running(tmp_path):
    """Makes engines that give what they have loaded."""
    numbers = count()
    with contextlib.ExitStack() as stack:

        def start(name, checkpoint, sources=(), cache=None, tls=None, secret=SECRET, mooncake=""):
            address = f"unix:{tmp_path}/{next(numbers)}"
            manager = WeightManager([address, "tcp:127.0.0.1:0"], sources, secret, tls, mooncake)
            loaded = load(checkpoint, CPU, None, cache, peers=manager)
            manager.give(loaded.image)
            tcp = manager.serve(manager.device or DeviceModel(peak_flops=1.0, bandwidth=2.0, memory=3))
            stack.callback(manager.close)
            return loaded, Source(name, address), Source(name, tcp)

        yield start


def same(ours, theirs):
    mine, others = parts(ours), parts(theirs)
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def slowly(function):
    def call(*arguments):
        time.sleep(0.05)
        return function(*arguments)

    return call


def damage(loaded):
    """One bit of what an engine gives, long after it was loaded."""
    eventually(lambda: loaded.image.digests)
    tensor = list(loaded.model.parameters())[-1]
    tensor.view(torch.uint8)[5] ^= 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("name", "options"),
    [("qwen3", {}), ("qwen3", {"tie_word_embeddings": True}), ("deepseek-v3", {})],
    ids=["untied", "tied", "experts"],
)
def test_the_same_bits_by_every_way(tmp_path, running, monkeypatch, method, name, options):
    if (reason := METHODS[method].missing(CPU, torch.bfloat16)) is not None:
        pytest.skip(reason)
    monkeypatch.setattr("penstock.nn.loader.method_for", lambda *_: METHODS[method])
    checkpoint = write_checkpoint(tmp_path / "model", name, dtype=torch.bfloat16, **options)
    first, here, there = running("first", checkpoint)
    assert first.source == "checkpoint"
    assert same(first.model, load(checkpoint, CPU).model)
    mapped, _, mapped_there = running("mapped", checkpoint, [there, here])
    assert mapped.source == "map"
    assert mapped.image.giver == "first"
    pulled, pulled_here, _ = running("pulled", checkpoint, [there])
    assert pulled.source == "tcp"
    again, _, _ = running("again", checkpoint, [pulled_here])  # who was given weights gives them
    far, _, _ = running("far", checkpoint, [mapped_there])
    models = [first.model, mapped.model, pulled.model, again.model, far.model]
    assert all(same(model, first.model) for model in models)
    # one memory on one host, and one more for what came over the network
    assert os.path.sameopenfile(first.image.fd, mapped.image.fd)
    assert os.path.sameopenfile(pulled.image.fd, again.image.fd)
    assert not os.path.sameopenfile(first.image.fd, pulled.image.fd)
    tokens = [Collector(make_engine(model)).run(make_request("a", [1, 2, 3])) for model in models]
    assert all(one == tokens[0] for one in tokens)


def test_a_head_that_config_json_does_not_know_of(tmp_path, running):
    from safetensors.torch import load_file, save_file

    checkpoint = write_checkpoint(tmp_path / "model", "qwen3", tie_word_embeddings=True)
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    for head in (weights["model.embed_tokens.weight"] + 1, weights["model.embed_tokens.weight"].clone()):
        save_file(weights | {"lm_head.weight": head}, file)
        first, here, there = running("first", checkpoint)
        for source in (here, there):
            model = running("second", checkpoint, [source])[0].model
            assert (model.lm_head is None) == (first.model.lm_head is None)
            assert same(model, first.model)
            assert same(model, load(checkpoint, CPU).model)


def test_a_bit_that_has_changed_is_noticed_and_the_next_source_taken(checkpoint, running, caplog):
    bad, bad_here, bad_there = running("bad", checkpoint)
    good, good_here, good_there = running("good", checkpoint)
    damage(bad)
    for sources, source in (([bad_here, good_here], "map"), ([bad_there, good_there], "tcp")):
        with caplog.at_level(logging.INFO):
            loaded, _, _ = running("new", checkpoint, sources)
        assert (loaded.source, loaded.image.giver) == (source, "good")
        assert same(loaded.model, good.model)
        assert "weights do not come from bad, others are asked: block " in caplog.text
        assert f"from {source} good" in caplog.text
        caplog.clear()
    assert running("new", checkpoint, [bad_here, bad_there])[0].source == "checkpoint"


@pytest.mark.skipif(native.missing() is not None, reason="nothing else is kept on disk")
def test_when_all_sources_fail_the_host_copy_and_then_the_disk(checkpoint, running, tmp_path, monkeypatch):
    cache = WeightCache(tmp_path / "cache", least=0)
    first, _, _ = running("first", checkpoint, cache=cache)
    cache.save()
    gone = [Source("gone", f"unix:{tmp_path}/gone"), Source("gone", "tcp:127.0.0.1:1")]
    copy, here, _ = running("copy", checkpoint, gone, cache)
    assert copy.source == "host"
    again, _, _ = running("again", checkpoint, [here])  # a file on disk is given like any memory
    assert again.source == "map"
    monkeypatch.setattr("penstock.nn.weight_cache.resident", lambda _: False)
    disk, _, _ = running("disk", checkpoint, gone, cache)
    assert disk.source == "disk"
    assert all(same(loaded.model, first.model) for loaded in (copy, again, disk))


@pytest.mark.parametrize("connections", [1, 2])
def test_a_source_that_dies_in_the_middle_leaves_what_was_right(checkpoint, running, monkeypatch, caplog, connections):
    monkeypatch.setattr(wire, "CONNECTIONS", connections)
    first, _, one = running("one", checkpoint)
    _, _, two = running("two", checkpoint)
    eventually(lambda: first.image.digests)
    begun, send = [], wire._send

    def dying(link, fd, start, stop):
        begun.append(start)
        if begun.count(3 * BLOCK) == 1 and start == 3 * BLOCK:
            send(link, fd, start, start + 100)
            link.close()
            raise EOFError
        send(link, fd, start, stop)

    monkeypatch.setattr(wire, "_send", dying)
    loaded, _, _ = running("new", checkpoint, [one, two])
    assert loaded.image.giver == "two"
    assert same(loaded.model, first.model)
    assert "weights do not come from one, others are asked: it hung up" in caplog.text
    if connections == 1:
        assert begun[:5] == [0, BLOCK, 2 * BLOCK, 3 * BLOCK, 3 * BLOCK]


def test_another_sources_other_bytes_are_not_mixed_with_what_was_right(checkpoint, running, monkeypatch):
    """Who has the same key, and does not have the same weights, is believed as a whole or not at all."""
    monkeypatch.setattr(wire, "CONNECTIONS", 1)
    _, _, one = running("one", checkpoint)
    second, _, two = running("two", checkpoint)
    damage(second)
    second.image.digests[:] = wire.digests(second.image.memory.numpy().data)
    send, begun = wire._send, []

    def dying(link, fd, start, stop):
        begun.append(start)
        if len(begun) == 3:
            link.close()
            raise EOFError
        send(link, fd, start, stop)

    monkeypatch.setattr(wire, "_send", dying)
    loaded, _, _ = running("new", checkpoint, [one, two])
    assert begun[:4] == [0, BLOCK, 2 * BLOCK, 0]
    assert same(loaded.model, second.model)


def test_other_weights_are_not_given(checkpoint, tmp_path, running, caplog):
    other = write_checkpoint(tmp_path / "other", "qwen3", dtype=torch.bfloat16, seed=1)
    _, here, there = running("other", other)
    loaded, _, _ = running("new", checkpoint, [here, there])
    assert loaded.source == "checkpoint"
    assert caplog.text.count("its weights are others") == 2
    assert same(loaded.model, load(checkpoint, CPU).model)


def test_only_who_knows_the_secret_is_given_any(checkpoint, running, monkeypatch):
    monkeypatch.setattr(wire, "PATIENCE", 0.5)  # who expects a challenge waits for it
    _, _, there = running("first", checkpoint)
    for secret, why in (("another", "it hung up"), (None, "does not show")):
        loaded, _, _ = running("new", checkpoint, [there], secret=secret)
        assert loaded.source == "checkpoint", why
    _, _, open_to_all = running("open", checkpoint, secret=None)
    assert running("new", checkpoint, [open_to_all])[0].source == "checkpoint", "and takes none from a stranger"


@NEEDS_OPENSSL
def test_under_tls(checkpoint, running, monkeypatch):
    monkeypatch.setattr(wire, "PATIENCE", 0.5)
    files = certificate()
    first, _, there = running("first", checkpoint, tls=files)
    loaded, _, _ = running("second", checkpoint, [there], tls=files)
    assert loaded.source == "tcp"
    assert same(loaded.model, first.model)
    assert running("third", checkpoint, [there])[0].source == "checkpoint"


@NEEDS_MOONCAKE
def test_by_mooncake_where_both_have_it(checkpoint, running, caplog):
    here = {"mooncake": "127.0.0.1"}
    first, _, there = running("first", checkpoint, **here)
    loaded, _, _ = running("second", checkpoint, [there], **here)
    assert (loaded.source, loaded.image.giver) == ("mooncake", "first")
    assert same(loaded.model, first.model)
    _, _, without = running("without", checkpoint)
    assert running("third", checkpoint, [without], **here)[0].source == "tcp"
    assert "weights do not come from without by Mooncake, others are asked: it has no Mooncake" in caplog.text
    assert running("fourth", checkpoint, [there])[0].source == "tcp"
    assert running("fifth", checkpoint, [there], secret="another", **here)[0].source == "checkpoint"
    damage(first)
    loaded, _, _ = running("sixth", checkpoint, [there, without], **here)
    assert (loaded.source, loaded.image.giver) == ("tcp", "without")
    assert "from first by Mooncake, others are asked: block " in caplog.text
    assert same(loaded.model, running("seventh", checkpoint)[0].model)


@NEEDS_MOONCAKE
def test_a_giver_that_ends_while_mooncake_reads(checkpoint, running, monkeypatch, caplog):
    """Its port stays, for an engine of Mooncake's is never ended; who reads notices by the connection."""
    first, _, there = running("first", checkpoint, mooncake="127.0.0.1")
    eventually(lambda: first.image.digests)
    lend = wire.WeightServer._lend

    def ending(self, link, *more):
        link.settimeout(0.001)
        lend(self, link, *more)

    monkeypatch.setattr(wire.WeightServer, "_lend", ending)
    monkeypatch.setattr(wire, "_digest", slowly(wire._digest))
    loaded, _, _ = running("second", checkpoint, [there], mooncake="127.0.0.1")
    assert loaded.source == "tcp"
    assert same(loaded.model, first.model)


def test_engines_of_this_host_are_asked_first_and_then_those_that_the_launcher_has_heard_of(checkpoint, running):
    first, here, there = running("first", checkpoint)
    folder = Path(here.address.removeprefix("unix:")).parent
    givers, dead = folder / "givers", Source("dead", "tcp:127.0.0.1:1")
    neighbours = Neighbours("unix:/own", f"{folder}/*.weights", givers, within=60.0)
    late = threading.Timer(0.1, givers.write_text, [json.dumps({each.name: each.address for each in (dead, there)})])
    late.start()  # as of a launcher that has just joined
    loaded, own, _ = running("new", checkpoint, neighbours)
    assert (loaded.source, loaded.image.giver) == ("tcp", "first")
    assert same(loaded.model, first.model)
    os.link(own.address.removeprefix("unix:"), folder / "mate.weights")
    assert list(neighbours) == [Source("mate", f"unix:{folder}/mate.weights"), dead, there]
    assert list(Neighbours(f"unix:{folder}/mate.weights", f"{folder}/*.weights")) == []
    assert running("third", checkpoint, neighbours)[0].source == "map"


def test_a_source_with_room_for_one_connection_gives_all_over_that(checkpoint, running, monkeypatch):
    monkeypatch.setattr(wire, "AT_ONCE", 1)
    first, _, there = running("first", checkpoint)
    loaded, _, _ = running("new", checkpoint, [there])
    assert loaded.source == "tcp"
    assert same(loaded.model, first.model)


def test_a_source_that_stands_still_is_left(checkpoint, running, monkeypatch):
    monkeypatch.setattr(wire, "PATIENCE", 0.2)
    _, _, there = running("first", checkpoint)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        still = Source("still", f"tcp:127.0.0.1:{silent.getsockname()[1]}")
        loaded, _, _ = running("new", checkpoint, [still, there])
    assert loaded.image.giver == "first"


def test_nothing_is_left_behind(checkpoint, running, tmp_path):
    def held():
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("penstock-weights")
        return (
            len(os.listdir("/proc/self/fd")),
            maps,
            threading.active_count(),
            sorted(p.name for p in tmp_path.iterdir()),
        )

    before = held()
    for _ in range(2):
        with contextlib.ExitStack() as stack:
            sources = []
            for name in ("one", "two", "three"):
                manager = WeightManager([f"unix:{tmp_path}/{name}", "tcp:127.0.0.1:0"], sources, SECRET)
                loaded = load(checkpoint, CPU, peers=manager)
                manager.give(loaded.image)
                sources = (
                    [Source("one", manager.serve(None))] if name == "one" else [Source("two", f"unix:{tmp_path}/two")]
                )
                stack.callback(manager.close)
            bad = WeightManager([], [Source("one", "tcp:127.0.0.1:1")], SECRET)
            load(checkpoint, CPU, peers=bad)
        del manager, loaded, bad, stack
        eventually(lambda: held() == before, 5, lambda: f"{held()}, before {before}")


def test_whoever_closes_waits_for_no_digests_and_leaves_no_thread(checkpoint, monkeypatch):
    """One that works while its interpreter ends may abort the process, and hide why that ended."""
    asked, goes_on = threading.Event(), threading.Event()

    def slowly(block):
        asked.set()
        assert goes_on.wait(20)
        return 0

    monkeypatch.setattr(wire, "xxh3_64_intdigest", slowly)
    manager = WeightManager([])
    manager.give(load(checkpoint, CPU, peers=manager).image)
    (offer,) = manager._offers.values()
    assert asked.wait(20)
    closing = threading.Thread(target=manager.close)
    closing.start()
    eventually(offer._closed.is_set)
    goes_on.set()
    closing.join(20)
    assert [each.is_alive() for each in (closing, offer._learning)] == [False, False]
    assert not offer.image.digests


def test_an_engine_gives_its_weights_until_it_sleeps_without_them(checkpoint, tmp_path):
    options = EngineOptions(model=str(checkpoint), kv_cache_memory=16 << 20, max_num_seqs=4, weight_cache=False)
    address = f"unix:{tmp_path}/first"
    first, second = WeightManager([address]), WeightManager([], [Source("first", address)])
    built = build_engine(options, SystemClock(), peers=first)
    first.serve(DeviceModel(peak_flops=1.0, bandwidth=2.0, memory=3))
    other = build_engine(options, SystemClock(), peers=second)
    assert other.worker.loaded.source == "map"
    assert second.device == DeviceModel(peak_flops=1.0, bandwidth=2.0, memory=3)
    key = built.worker.loaded.image.key
    tokens = Collector(other.engine).run(make_request("a", [1, 2, 3]))
    built.worker.sleep(1)
    os.close(ask_to_map(address, key)[1])
    built.worker.sleep(2)
    with pytest.raises(Unavailable, match="no weights to give now"):
        ask_to_map(address, key)
    assert Collector(other.engine).run(make_request("a", [1, 2, 3])) == tokens, "what was mapped stays"
    built.worker.wake_up(("weights", "kv_cache"))
    os.close(ask_to_map(address, key)[1])
    assert Collector(built.engine).run(make_request("a", [1, 2, 3])) == tokens
    for closed in (built, other, first, second):
        closed.close()


def test_an_engine_gives_no_weights_whose_files_have_changed(tmp_path, caplog):
    """Their key is of the first bytes of every tensor, and an engine keeps KV as of the files that it finds."""
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    options = EngineOptions(model=str(checkpoint), kv_cache_memory=16 << 20, max_num_seqs=4, weight_cache=False)
    with contextlib.ExitStack() as stack:

        def start(name, sources=()):
            manager = WeightManager([f"unix:{tmp_path}/{name}", "tcp:127.0.0.1:0"], sources)
            stack.callback(manager.close)
            built = build_engine(options, SystemClock(), peers=manager)
            stack.callback(built.close)
            return built.worker, [Source(name, f"unix:{tmp_path}/{name}"), Source(name, manager.serve(None))]

        old, of_old = start("old")
        assert start("same", of_old)[0].loaded.source == "map"
        edit(checkpoint)
        new, of_new = start("new", of_old)
        assert new.loaded.source == "checkpoint"
        assert caplog.text.count("others are asked: its checkpoint has changed since it was loaded") == 2
        assert not same(new.model, old.model)
        for sources, way in (([of_old[0], of_new[0]], "map"), ([of_old[1], of_new[1]], "tcp")):
            last, _ = start(way, sources)
            assert (last.loaded.source, last.loaded.image.giver) == (way, "new")
            assert same(last.model, new.model)
            assert last.files == new.files != old.files


def test_files_that_change_after_weights_were_mapped_end_the_start(tmp_path, running, monkeypatch):
    checkpoint = write_checkpoint(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    _, here, _ = running("first", checkpoint)
    find = worker.load

    def edited(directory, *more, **peers):
        loaded = find(directory, *more, **peers)
        edit(directory)
        return loaded

    monkeypatch.setattr(worker, "load", edited)
    options = EngineOptions(model=str(checkpoint), kv_cache_memory=16 << 20, max_num_seqs=4, weight_cache=False)
    with pytest.raises(ConfigError, match="was changed while it was read"):
        build_engine(options, SystemClock(), peers=WeightManager([], [here]))


@pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
def test_each_rank_has_its_shard_from_the_same_rank_of_another_engine(checkpoint, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(wire, "BLOCK", 8 << 20)  # as in the ranks' own processes
    caplog.set_level(logging.INFO, "penstock")
    options = EngineOptions(
        model=str(checkpoint), kv_cache_memory=16 << 20, max_num_seqs=4, weight_cache=False, tensor_parallel_size=2
    )
    folder, empty, givers = tmp_path / "host", tmp_path / "other", tmp_path / "givers"
    folder.mkdir()
    empty.mkdir()

    with contextlib.ExitStack() as stack:

        def start(own, told):
            manager = WeightManager.of(told, [f"unix:{own}", "tcp:127.0.0.1:0"])
            stack.callback(manager.close)
            built = build_engine(options, SystemClock(), peers=manager)
            stack.callback(built.close)
            tokens = Collector(built.engine).run(make_request("a", [1, 2, 3]))
            return built, manager, manager.serve(None), tokens

        def sources():
            found = re.findall(r"weights are there after \S+ s, from (.*)", caplog.text)
            caplog.clear()
            return found

        def told(own, **more):
            return WeightSources(f"unix:{own}", f"{own.parent}/*.weights", **more)

        own = folder / "first.weights"
        first, manager, there, tokens = start(own, told(own))
        assert sources() == ["checkpoint", "checkpoint"]

        other = folder / "second.weights"
        _, _, _, again = start(other, told(other))
        assert (sources(), again) == (["map first", "map first"], tokens)

        far = empty / "third.weights"
        givers.write_text(json.dumps({"first": there}))
        third, _, _, again = start(far, told(far, givers=str(givers), secret=None))
        assert (sources(), again) == (["tcp first", "tcp first"], tokens)

        third.memory.sleep(2)
        third.memory.wake_up(("weights", "kv_cache"))
        assert sources() == ["tcp first", "tcp first"]
        assert Collector(third.engine).run(make_request("b", [1, 2, 3]))["b"] == tokens["a"]

        keys = list(manager._offers)
        assert len(keys) == 2
        with monkeypatch.context() as patch:
            patch.setattr(manager, "is_current", lambda: False)
            for key in keys:
                with pytest.raises(Unavailable, match="its checkpoint has changed"):
                    ask_to_map(f"unix:{own}", key)
        first.memory.sleep(2)
        for key in keys:
            with pytest.raises(Unavailable, match="no weights to give now"):
                ask_to_map(f"unix:{own}", key)


@pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
def test_each_rank_is_in_a_process_group_with_the_same_rank_of_another_engine(
    checkpoint, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(wire, "BLOCK", 8 << 20)  # as in the ranks' own processes
    caplog.set_level(logging.INFO, "penstock")
    options = EngineOptions(
        model=str(checkpoint), kv_cache_memory=16 << 20, max_num_seqs=4, weight_cache=False, tensor_parallel_size=2
    )
    givers = tmp_path / "givers"
    with contextlib.ExitStack() as stack:

        def start(name, sockets, **more):
            own = f"unix:{tmp_path}/{name}"
            told = WeightSources(own, f"{tmp_path}/{sockets}", pair="gloo", public="tcp:127.0.0.1:0", **more)
            manager = WeightManager.of(told, [own, told.public])
            stack.callback(manager.close)
            built = build_engine(options, SystemClock(), peers=manager)
            stack.callback(built.close)
            found = re.findall(r"weights are there after \S+ s, from (.*)", caplog.text)
            caplog.clear()
            tokens = Collector(built.engine).run(make_request("a", [1, 2, 3]))
            return manager, manager.serve(None), found, tokens

        manager, there, found, tokens = start("first.weights", "none")
        assert found == ["checkpoint", "checkpoint"]
        (addresses,) = manager._there.values()
        assert [each.partition(":")[0] for each in addresses] == ["unix", "tcp"], "where rank 1 gives its own"
        givers.write_text(json.dumps({"first": there}))
        for name, sockets, more in (("here", "first.weights", {}), ("there", "none", {"givers": str(givers)})):
            _, _, found, again = start(name, sockets, **more)
            assert (found, again) == (["gloo first", "gloo first"], tokens)


def test_weights_of_a_rank_for_which_there_is_no_room_for_files():
    fd = os.dup(0)
    with pytest.raises(OSError, match="Too many open files"):
        passed("key", [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_an_address_that_cannot_be_had(tmp_path):
    manager = WeightManager([f"unix:{tmp_path}/none/there"])
    with pytest.raises(ConfigError, match="cannot listen there"):
        manager.serve(None)


def test_memory_that_was_given_can_be_neither_written_nor_cut(checkpoint, running):
    import mmap

    loaded, here, _ = running("first", checkpoint)
    weights, fd = ask_to_map(here.address, image_key(checkpoint, torch.bfloat16, held(loaded.model)))
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, weights.bytes)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


@pytest.mark.slow
def test_an_instance_that_is_restarted_maps_what_the_others_have(tmp_path):
    with deployed(colocated()) as up:
        earlier = up.kill("engine-1")
        up.wait_restarted("engine-1", earlier)
        eventually(lambda: any("from map engine-0" in line for line in up.lines), 60, up.log)
        eventually(lambda: 'engine="engine-1",model_name="demo",source="map"' in up.get("/metrics"), 30, up.log)
        folder = up.folder
    assert not folder.exists()
