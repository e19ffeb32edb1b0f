"""The instances as a master sees them, and where sequences with a place are."""

from math import inf

import pytest

from penstock.core.wire.engine import Drain, Stopped
from penstock.core.wire.master import Endpoint, Place, Relocate, StopInstance
from penstock.sched.cluster import Migration
from penstock.service.events import Notice, ToEngine, ToFrontend
from penstock.service.fleet import Fleet
from penstock.service.instances import ChannelLost
from penstock.service.placed import PlacedSequences
from penstock.service.queue import Tracked
from tests.helpers.policies import demand
from tests.helpers.scripted import ready, snapshot


def fleet_of(*names, **changes):
    fleet = Fleet(
        [Endpoint(name, name) for name in names],
        everybody=True,
        scaler=None,
        slow=None,
        recorder=None,
        media_route=None,
        ideal=None,
    )
    for name in names:
        fleet.hear(0.0, name, ready(name, num_blocks=100, max_model_len=1000, **changes))
        fleet.hear(0.0, name, snapshot(num_blocks=100, free_blocks=100))
    return fleet


def told(actions):
    return [action for action in actions if not isinstance(action, Notice)]


def test_an_instance_is_there_from_its_first_word_until_its_connection_ends():
    fleet = fleet_of("a", "b")
    fleet.check()
    assert fleet.states(0.0) == {"a": "ready", "b": "ready"}
    assert fleet.is_new("a", ready("a", life=2))
    assert not fleet.is_new("a", ready("a"))
    assert not fleet.is_new("c", ready("c")), "it is not part of the deployment"
    fleet.hear(1.0, "a", ChannelLost("gone"))
    assert fleet.states(1.0) == {"a": "absent", "b": "ready"}
    assert [session.name for session in fleet.roster.able(1.0)] == ["b"]
    fleet.remove(1.0, "a", "its host has gone")
    assert fleet.states(1.0) == {"b": "ready"}
    fleet.check()


def test_one_that_is_to_leave_drains_and_is_stopped_once_it_has():
    fleet = fleet_of("a")
    fleet.hear(0.0, "a", snapshot(sequence=2, running=1, num_blocks=100, free_blocks=90))
    assert told(fleet.register(0.0, Endpoint("a", "a", state="leaving"))) == [ToEngine("a", Drain(1))]
    assert fleet.states(0.0) == {"a": "draining"}
    assert not fleet.retire(0.0), "something runs there"
    fleet.hear(0.1, "a", snapshot(sequence=3, draining=True, num_blocks=100, free_blocks=100))
    assert fleet.retire(0.1) == [StopInstance("a")]
    fleet.hear(0.2, "a", Stopped(1))
    assert fleet.states(0.2) == {"a": "absent"}
    fleet.check()


def placed_at(fleet, name, *, open_=False):
    """A sequence that is prefilled there."""
    placed, key = PlacedSequences(fleet, None), ("f", "r")
    flight = Tracked(demand("r", 50), Place("r", 50, 10, []), -inf, open=open_)
    flight.prefiller = flight.home = fleet.sessions[name]
    placed.sequences[key] = flight
    flight.prefiller.add_prompt(0.0, flight.demand)
    flight.home.house(flight.demand)
    return placed, key


def test_a_sequence_goes_on_elsewhere_and_is_counted_there():
    fleet = fleet_of("a", "b")
    placed, key = placed_at(fleet, "a", open_=True)
    placed.check()
    assert not placed.open, "its prompt has not ended"
    placed.begin(1.0, key)
    assert [resident.at for resident in placed.open] == ["a"]
    action = placed.relocate(1.0, Migration(key=key, to="b", reason="room"))
    assert action == ToFrontend("f", Relocate("r", 0, fleet.sessions["b"].peer, "room"))
    assert not placed.open
    assert (placed.residents(1.0, "a"), placed.residents(1.0, "b")) == ([], []), "it is on its way"
    placed.settle(key, fleet.sessions["b"])
    assert [resident.at for resident in placed.residents(1.0, "b")] == ["b"]
    placed.check()
    assert placed.end(2.0, key) is not None
    assert placed.end(2.0, key) is None
    placed.check()
    fleet.check()


@pytest.mark.parametrize("where", ["home", "prompt", "open"])
def test_check_tells_of_what_is_miscounted(where):
    fleet = fleet_of("a", "b")
    placed, key = placed_at(fleet, "a")
    flight = placed.sequences[key]
    match where:
        case "home":
            flight.home = fleet.sessions["b"]
        case "prompt":
            flight.prefiller = fleet.sessions["b"]
        case "open":
            placed.prefilled["f", "s"] = flight
    with pytest.raises(AssertionError):
        placed.check()
