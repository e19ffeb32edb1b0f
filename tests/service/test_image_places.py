"""Who looks at a request's images, by what the master knows."""

from dataclasses import replace

import pytest

from penstock.core.wire.engine import CacheDelta, Failed
from penstock.core.wire.master import Begun, Ended, Outcome, Place, PlacedImage
from penstock.kv.embeddings import EMBEDDINGS
from penstock.sched.cluster import InstanceLoad
from penstock.service.history import as_values, collect, pattern_of
from penstock.service.recorder import FlightRecorder
from penstock.service.recording import RecordDecoder, RecordEncoder, from_bytes, to_bytes
from tests.helpers.scripted import LAYOUT
from tests.service.test_master import Cluster

RED, BLUE = PlacedImage(b"red" * 5, 300), PlacedImage(b"blue" * 4, 300)


class Seeing(Cluster):
    ROLES = Cluster.ROLES | {"e": "encode"}

    def __init__(self, *names, **changes):
        super().__init__(*names, max_model_len=4096, num_blocks=64, embedding_size=64, **changes)
        for name in names:
            self.snap(name, 1)

    def ask(self, *images, tokens=700):
        self.count += 1
        (answer,) = self.frontend(Place(f"r{self.count}", tokens, 10, [], images=list(images)))
        return answer

    def has(self, name, *images, number=1):
        self.engine(name, CacheDelta(1, number, [i.digest for i in images], [], tier=EMBEDDINGS, whole=number == 1))

    def route(self, route):
        self.master.fleet.images.route = route


def looks(placed):
    """Who is told to look at an image, or has done so, in order."""
    return [(image.peer.name, image.encodes) for image in placed.images]


def legs(placed):
    return [leg.peer.name for leg in placed.route]


def test_instances_that_encode_get_images_and_no_prompts():
    cluster = Seeing("e0", "p0", "d0")
    for _ in range(4):
        placed = cluster.ask(RED)
        assert legs(placed) == ["p0", "d0"]
        assert placed.reason.endswith("images at e0")
    assert legs(cluster.place()) == ["p0", "d0"]
    cluster.engine("p0", Failed("gone"))
    assert legs(cluster.ask(BLUE)) == ["d0"], "who decodes prefills rather than who encodes"
    cluster.engine("d0", Failed("gone"))
    placed = cluster.ask(BLUE)
    assert legs(placed) == ["e0"], "there is no other"
    assert looks(placed) == []


def test_each_route():
    cluster = Seeing("e0", "p0", "d0")
    assert looks(cluster.ask(RED, BLUE)) == [("e0", True), ("e0", True)]
    cluster.route("EP+D")
    green = PlacedImage(b"green", 10)
    assert looks(cluster.ask(green)) == []
    cluster.route("ED+P")
    placed = cluster.ask(green)
    assert (legs(placed), looks(placed)) == (["p0", "d0"], [("d0", True)])
    cluster.route("EPD")
    placed = cluster.ask(PlacedImage(b"grey", 10))
    assert (legs(placed), looks(placed)) == (["p0"], [])
    assert legs(cluster.place()) == ["p0", "d0"], "what has no images is not asked about"


def test_images_are_spread_by_what_is_still_to_be_looked_at():
    cluster = Seeing("e0", "e1", "p0", "d0")
    assert looks(cluster.ask(RED)) == [("e0", True)]
    assert looks(cluster.ask(BLUE)) == [("e1", True)]
    assert looks(cluster.ask(RED)) == [("e0", False)], "it is on its way"
    cluster.frontend(Begun(["r1"]))
    assert looks(cluster.ask(PlacedImage(b"third", 10))) == [("e0", True)]
    cluster.frontend(Ended(["r2"]))
    assert cluster.master.fleet.sessions["e1"].encodes == {}


def test_what_another_kind_of_engine_makes_of_images_is_not_taken():
    cluster = Seeing("e0", "p0", "d0")
    cluster.engine("e0", Failed("gone"))
    cluster.start("e0", life=2, max_model_len=4096, layout=replace(LAYOUT, dtype="bfloat16"))
    cluster.engine("e0", CacheDelta(2, 1, [RED.digest], [], tier=EMBEDDINGS, whole=True))
    assert looks(cluster.ask(RED)) == looks(cluster.ask(BLUE)) == []


def test_what_was_looked_at_is_found_where_it_is():
    cluster = Seeing("e0", "p0", "p1", "d0")
    cluster.has("p1", RED)
    assert looks(cluster.ask(RED)) in ([("p1", False)], []), "by name, unless it is prefilled there"
    cluster.engine("p1", Failed("gone"))
    assert looks(cluster.ask(RED)) == [("e0", True)]
    cluster.has("p0", BLUE)
    assert looks(cluster.ask(BLUE)) == [], "it is there"


@pytest.mark.parametrize(
    ("encode_ms", "mb_ms", "fetched"),
    [(None, None, True), (1.0, None, True), (1e-6, None, False), (1.0, 1000.0, True), (1.0, 5000.0, False)],
)
def test_what_another_prefiller_has_seen_is_fetched_where_that_is_sooner(encode_ms, mb_ms, fetched):
    """300 ms to look at one, of 0.08 MB."""
    cluster = Seeing("p0", "p1", "d0")
    for name in ("p0", "p1"):
        cluster.snap(name, 2, encode_ms=encode_ms, embedding_mb_ms=mb_ms)
    cluster.has("p1", RED)
    cluster.engine("p1", CacheDelta(1, 2, [BLUE.digest], [], tier=EMBEDDINGS))
    placed = cluster.ask(RED, BLUE)
    expected = [("p1", False)] * 2 if fetched else []
    assert looks(placed) == ([] if legs(placed)[0] == "p1" else expected)


def test_prompts_begin_later_where_their_images_are_not():
    cluster = Seeing("p0", "p1", "d0")
    for name in ("p0", "p1"):
        cluster.snap(name, 2, encode_ms=1.0)
    cluster.has("p1", RED)
    demand = cluster.master._demand(0.0, ("f", "r"), Place("r", 700, 10, [], images=[RED, BLUE]))
    loads = {load.name: load for load in cluster.master._view(0.0).instances}
    begins = {name: loads[name].begins_at(0.0, demand) for name in ("p0", "p1")}
    assert begins["p1"] == pytest.approx(0.3)
    assert begins["p0"] == pytest.approx(0.3, rel=0.01), "what it does not have comes while it looks at the other"
    assert demand.images_at == {"p1": 1}
    alone = cluster.master._demand(0.0, ("f", "r"), Place("r", 700, 10, [], images=[RED]))
    assert loads["p1"].begins_at(0.0, alone) == 0.0 < loads["p0"].begins_at(0.0, alone)


def test_policies_see_who_encodes_apart():
    cluster = Seeing("e0", "p0", "d0")
    cluster.ask(RED)
    view = cluster.master._view(0.0)
    assert {load.name for load in view.instances} == {"p0", "d0"}
    (load,) = view.encoders
    assert isinstance(load, InstanceLoad)
    assert (load.name, load.encoding_tokens) == ("e0", 300)


def test_a_policy_changes_the_route_of_what_comes_next():
    class Choosing:
        route, came, why = None, [], ""

        def observe(self, now, demand, images, seen):
            self.came.append((demand.key[1], images, seen))

        def began(self, now, key):
            self.came.append(key[1])

        def ended(self, now, key, tokens):
            self.came.append(tokens)

        def choose(self, view):
            return self.route

    cluster = Seeing("e0", "p0", "d0")
    media = Choosing()
    cluster.master._policies = replace(cluster.master._policies, media=media)
    first = cluster.ask(RED)
    assert looks(first) == [("e0", True)]
    media.route, media.why = "ED+P", "ED+P carries more"
    cluster.tick()
    told = cluster.ask(RED, BLUE)
    assert "ED+P carries more" in told.reason
    assert looks(told) == [("e0", False), ("d0", True)], "what is seen already is not seen again"
    assert looks(cluster.ask(PlacedImage(b"green", 10))) == [("d0", True)]
    assert cluster.master.overview(0.0).placed == 3, "what was placed before goes on"
    media.route = None
    cluster.tick()
    assert looks(cluster.ask(PlacedImage(b"grey", 10))) == [("e0", True)]
    assert media.came[:2] == [("r1", [300], 0), ("r2", [300], 300)]
    cluster.frontend(Ended(["r1"], [Outcome("r1", 90.0, 5.0, 1.0, tokens=7)]))
    assert media.came[-1] == 7


def test_what_a_prefiller_looks_at_itself_takes_its_time():
    """So another one begins sooner; and a prompt without images waits for them too."""
    cluster = Seeing("p0", "p1", "d0")
    for name in ("p0", "p1"):
        cluster.snap(name, 2, encode_ms=1.0)
    busy = legs(cluster.ask(PlacedImage(b"large", 5000)))[0]
    (free,) = {"p0", "p1"} - {busy}
    sessions = cluster.master.fleet.sessions
    assert (sessions[busy].encoding_tokens, sessions[free].encoding_tokens) == (5000, 0)
    loads = {load.name: load for load in cluster.master._view(0.0).instances}
    assert loads[busy].free_at - loads[free].free_at >= 5.0
    demand = cluster.master._demand(0.0, ("f", "r"), Place("r", 700, 10, [], images=[RED]))
    assert demand.images_in == {busy: pytest.approx(5.3), free: pytest.approx(0.3), "d0": 0.0}
    cluster.frontend(Begun(["r1"]))
    assert sessions[busy].encoding_tokens == 0
    cluster.master.check()


def test_why_images_are_looked_at_where_they_are():
    cluster = Seeing("e0", "p0", "d0")
    cluster.has("p0", RED)
    recorder = cluster.master._recorder = FlightRecorder()
    cluster.ask(RED, BLUE)
    decision = recorder.entries[-1].decision
    assert decision.media_route == "E+P+D"
    assert {(way.at, way.how, way.images, way.tokens) for way in decision.images} == {
        ("p0", "looked", 1, RED.tokens),
        ("e0", "looks", 1, BLUE.tokens),
    }
    encoder = RecordEncoder()
    records = [encoder.begin(0.0, 0.0), *(record for entry in recorder.entries for record in encoder.encode(entry))]
    again = [entry for _, entry in RecordDecoder().decode([from_bytes(to_bytes(record)) for record in records])]
    assert list(again[-1].decision.images) == decision.images
    (sequence,) = collected(recorder, "r1")
    (placement,) = as_values(sequence)["placements"]
    assert placement["media_route"] == "E+P+D"
    assert [way["at"] for way in placement["images"]] == ["p0", "e0"]


def collected(recorder, name):
    found = {}
    collect(((entry.now, entry) for entry in recorder.entries), pattern_of(name), found)
    return list(found.values())
