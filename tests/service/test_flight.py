"""One sequence over several instances: order, doubles, losses, and going on elsewhere."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import EngineFailure
from penstock.core.request import FinishReason, Hypothesis, Request, TokenLogprobs, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import LEASE, Leg, Peer, Stayed
from penstock.core.wire.master import Placed
from penstock.kv.keys import extend_keys
from penstock.service.flight import SIGN_OF_LIFE, Flight

P, D, E = Peer("p", 1, ""), Peer("d", 5, ""), Peer("e", 3, "")
REQUEST = Request(id="r", prompt=[1], params=SamplingParams(), seed=0, stop_ids=frozenset(), max_tokens=99)


def flight(decode=D, attempt=0, request=REQUEST):
    made = Flight(None, request)
    made.attempt = attempt
    launch(made, P, decode)
    return made


def launch(flight, prefill, decode=None, now=0.0):
    """Sent there, with the targets it asked with; what is sent."""
    asked = flight.question(now)
    route = [Leg("prefill", prefill), *([Leg("decode", decode)] if decode is not None else [])]
    return flight.launch(Placed("r", flight.attempt, route, ttft_ms=asked.ttft_ms, tpot_ms=asked.tpot_ms), now)


def out(start, *tokens, finish=None, attempt=0, error=""):
    return TokenOutput("r", list(tokens), finish=finish, start=start, generation=attempt, error=error)


def feed(flight, peer, output, now=0.0):
    return [(o.start, o.tokens, o.finish) for o in flight.accept(peer.name, peer.incarnation, output, now)]


def overdue(flight, now):
    """Whether it is stranded by then."""
    flight.tick(now)
    return flight.stranded


def test_a_decoder_that_overtakes_is_held_back():
    f = flight()
    assert feed(f, D, out(1, 11)) == []
    assert feed(f, D, out(2, 12, finish=FinishReason.LENGTH)) == []
    assert feed(f, P, out(0, 10)) == [(0, [10], None), (1, [11], None), (2, [12], FinishReason.LENGTH)]


def test_doubles_are_dropped_and_overlaps_cut():
    f = flight()
    feed(f, P, out(0, 10, 11))
    assert feed(f, D, out(1, 11)) == []
    piece = TokenOutput("r", [11, 12], [TokenLogprobs(-1.0, 1, []), TokenLogprobs(-2.0, 1, [])], start=1)
    (rest,) = f.accept("d", 5, piece, 0.0)
    assert (rest.start, rest.tokens, rest.logprobs[0].chosen) == (2, [12], -2.0)


def test_what_is_of_another_attempt_incarnation_or_instance_is_dropped():
    f = flight(attempt=2)
    assert feed(f, P, out(0, 10, attempt=1)) == []
    assert feed(f, Peer("p", 2, ""), out(0, 10, attempt=2)) == []
    assert feed(f, Peer("x", 1, ""), out(0, 10, attempt=2)) == []
    assert feed(f, P, out(0, 10, attempt=2)) == [(0, [10], None)]


def test_an_error_of_the_prefiller_counts_until_the_decoder_spoke():
    f = flight()
    feed(f, P, out(0, 10))
    feed(f, D, out(1, 11))
    assert feed(f, P, out(1, finish=FinishReason.ABORT)) == feed(f, P, out(1, finish=FinishReason.ERROR)) == []
    assert not f.stranded
    with pytest.raises(EngineFailure, match=r"^d gave this request up: no number$"):
        feed(f, D, out(2, finish=FinishReason.ERROR, error="no number"))


@pytest.mark.parametrize("decode", [None, D])
def test_what_an_instance_gives_up_goes_on_elsewhere_unless_its_numbers_are_broken(decode):
    f = flight(decode)
    feed(f, P, out(0, 10))
    assert feed(f, P, out(1, finish=FinishReason.ABORT)) == []
    assert (f.stranded, f.interrupted) == (True, "p dropped this request")
    with pytest.raises(EngineFailure, match="no number"):
        feed(flight(decode), P, out(0, finish=FinishReason.ERROR, error="no number"))


# --- losses


@pytest.mark.parametrize(
    ("decode", "heard", "lost"),
    [
        (None, None, P),  # it has the sequence alone
        (D, None, P),  # it was still prefilling
        (D, (D, 0), D),  # it decoded
        (D, (D, 1), P),  # its first tokens can no longer come
    ],
)
def test_the_loss_of_who_has_it_strands_a_sequence(decode, heard, lost):
    f = flight(decode)
    if heard:
        feed(f, heard[0], out(heard[1], 10))
    f.lose(E, "it never was here", 0.0)
    assert not f.stranded
    f.lose(lost, "burnt", 0.0)
    assert f.stranded
    assert f.interrupted.startswith(f"{lost.name} failed during this request")
    assert feed(f, P, out(0, 10)) == [], "late"


def test_a_lost_prefiller_does_not_hurt_what_decodes_elsewhere():
    f = flight()
    feed(f, P, out(0, 10))
    feed(f, D, out(1, 11))
    f.lose(P, "gone", 0.0)
    assert not overdue(f, 1e9)
    assert feed(f, D, out(2, 12)) == [(2, [12], None)]
    assert f.peers == [D]


def test_who_may_just_have_taken_it_over_has_time_to_show_it():
    f = flight()
    feed(f, P, out(0, 10))
    f.lose(P, "gone", 100.0)
    assert not overdue(f, 100.0 + SIGN_OF_LIFE)
    assert feed(f, D, out(1, 11), now=101.0) == [(1, [11], None)]
    assert not overdue(f, 1e9)
    f = flight()
    feed(f, P, out(0, 10))
    f.lose(P, "gone", 100.0)
    assert overdue(f, 100.1 + SIGN_OF_LIFE)
    assert f.interrupted == "p failed during this request, and nothing came of it since"


def stays(flight, peer, now=0.0, to=D, here=True):
    return flight.stayed(peer.name, Stayed(peer.incarnation, "r", flight.attempt, "no room", to, here), now)


def test_a_prefiller_that_goes_on_alone_says_so():
    f = flight()
    f.lose(D, "gone", 100.0)
    assert not overdue(f, 1000.0), "it is still being prefilled"
    assert feed(f, P, out(0, 10), now=1004.0) == [(0, [10], None)]
    assert not overdue(f, 1004.0 + SIGN_OF_LIFE)
    assert stays(f, P, 1004.0 + SIGN_OF_LIFE)
    assert not overdue(f, 1e9), "whoever decodes it will say when it does not"
    assert feed(f, P, out(1, 11), now=2e9) == [(1, [11], None)]
    assert (f.route, f.peers, f.handoffs) == ("p", [P], 0)


def test_it_moves_on_and_back_one_hand_off_after_the_other():
    f = flight(None)
    feed(f, P, out(0, 10))
    assert (f.move(P), f.peers) == (P, [P]), "it is there"
    assert f.move(D) == P
    assert f.move(E) is None, "one hand-off at a time"
    assert f.peers == [P, D]
    assert feed(f, P, out(1, 11)) == [(1, [11], None)]
    assert feed(f, D, out(3, 13)) == []
    assert f.move(E) is None, "a token is missing"
    assert not stays(f, P), "its tokens come from elsewhere"
    assert feed(f, P, out(2, 12)) == [(2, [12], None), (3, [13], None)]
    assert (f.peers, f.at, f.handoffs) == ([D], "d", 1)
    assert f.move(P) == D
    assert feed(f, P, out(2, 12)) == [], "late"
    assert (f.at, f.handoffs) == ("d", 1)
    assert feed(f, P, out(4, 14)) == [(4, [14], None)]
    assert (f.peers, f.route, f.handoffs) == ([P], "p>d>p", 2)
    assert f.move(D) == P
    assert not stays(f, D), "it does not have it"
    assert stays(f, P)
    assert (f.peers, f.route) == ([P], "p>d>p")
    f.lose(D, "gone", 0.0)
    assert not f.stranded
    assert f.move(E) == P
    f.lose(P, "gone", 0.0)
    assert overdue(f, 1.1 * SIGN_OF_LIFE)
    f = flight()
    feed(f, P, out(0, 10))
    f.lose(D, "gone", 100.0)
    assert overdue(f, 100.1 + SIGN_OF_LIFE), "it was taken over, and nobody was told"


def test_an_answer_about_another_hand_off_ends_none():
    f = flight(None)
    feed(f, P, out(0, 10))
    assert f.move(D) == P
    for earlier in (None, E, P, Peer("d", 4, "")):
        assert not stays(f, P, to=earlier), "it was said before the engine heard of this one"
    assert feed(f, D, out(1, 11)) == [(1, [11], None)]
    assert (f.peers, f.handoffs) == ([D], 1)


def test_what_is_nowhere_goes_on_elsewhere():
    f = flight(None)
    feed(f, P, out(0, 10))
    f.move(D)
    assert stays(f, P, here=False)
    assert f.stranded
    assert "does not have" in f.interrupted


def test_tokens_that_nobody_can_send_any_more_strand_it():
    f = flight()
    feed(f, P, out(0, 10))
    f.lose(P, "gone", 0.0)
    assert feed(f, D, out(2, 12)) == []
    assert (f.stranded, f.interrupted) == (True, "p failed during this request, its first tokens are lost")
    f = flight()
    feed(f, D, out(1, 11), now=10.0)
    feed(f, D, out(2, 12), now=14.0)  # does not make the gap younger
    assert not overdue(f, 10.0 + LEASE)
    assert overdue(f, 10.1 + LEASE)
    assert f.interrupted == "tokens of this request that p had computed did not come"


# --- going on elsewhere


def test_another_place_is_another_attempt():
    f = flight()
    f.again()
    assert (f.attempt, f.launches, f.peers, f.route) == (1, 1, [], "")
    launch(f, D)
    assert (f.route, f.launches, f.interrupted) == ("d", 2, "")


def test_it_goes_on_from_what_its_client_has():
    f = flight(request=replace(REQUEST, prompt=list(range(100)), stop_ids=frozenset([7])))
    f.add_keys(b"root")
    asked = f.question(0.0)
    assert (asked.prompt_tokens, asked.max_tokens, len(asked.keys), asked.generation) == (100, 99, 1, 0)
    feed(f, P, out(0, 10))
    feed(f, D, out(1, *range(11, 40)))
    feed(f, D, out(35, 45))  # what is before it has not come
    f.lose(D, "gone", 2.0)
    f.again()
    f.add_keys(b"root")
    f.avoid = ["d"]
    again = f.question(2.0)
    assert (again.prompt_tokens, again.max_tokens, again.generation, again.exclude) == (130, 69, 1, ["d"])
    keys = []
    extend_keys(keys, b"root", [*range(100), *range(10, 40)], 2)
    assert (again.keys, asked.keys) == (keys, keys[:1])
    sent = launch(f, E, P, now=2.5)
    assert (sent.prompt, list(sent.generated), sent.max_tokens) == (f.request.prompt, list(range(10, 40)), 99)
    assert (f.heard, f.handed_over, f.stranded) == (0, False, False)
    assert f.interrupted
    assert feed(f, P, out(30, 40)) == feed(f, D, out(30, 40)) == [], "of the first attempt"
    assert feed(f, E, out(30, 40, attempt=1)) == [(30, [40], None)]
    assert feed(f, P, out(31, 7, attempt=1, finish=FinishReason.STOP)) == [(31, [7], FinishReason.STOP)]
    assert (f.received, f.first) == (32, 0.0)


def deadline(f, now):
    asked = f.question(now)
    return now - asked.waited + asked.ttft_ms / 1e3


def test_its_next_token_is_due_when_it_would_have_been_but_not_later_than_a_new_ones():
    request = replace(REQUEST, ttft_ms=500.0, tpot_ms=50.0)
    assert deadline(flight(request=request), 0.2) == pytest.approx(0.5)
    for tokens, lost_at, due in ((10, 1.2, 1.5), (10, 0.8, 1.3), (10, 2.0, 1.5)):
        f = flight(decode=None, request=request)
        feed(f, P, out(0, *range(tokens)), now=1.0)  # so the eleventh is due at 1.5
        f.lose(P, "gone", lost_at)
        f.again()
        assert deadline(f, lost_at + 0.1) == deadline(f, lost_at + 0.7) == pytest.approx(due)
        assert lost_at + 0.1 - launch(f, E, now=lost_at + 0.1).waited + 0.5 == pytest.approx(due)
    f = flight(decode=None, request=request)
    f.lose(P, "gone", 0.3)
    f.again()
    assert deadline(f, 0.4) == pytest.approx(0.5), "nothing has come yet"


def test_the_most_urgent_goes_first():
    def stranded(ttft, first, offline=False):
        f = flight(decode=None, request=replace(REQUEST, ttft_ms=ttft, tpot_ms=50.0, offline=offline))
        feed(f, P, out(0, *range(10)), now=first)
        f.lose(P, "gone", 1.0)
        return f

    flights = [stranded(None, 0.1, offline=True), stranded(900.0, 0.8), stranded(None, 0.1), stranded(900.0, 0.6)]
    assert [flights.index(f) for f in sorted(flights, key=lambda f: f.urgency)] == [3, 1, 2, 0]


def test_it_ends_once_and_its_first_token_is_its_first():
    f = flight(decode=None)
    feed(f, P, out(0, 10), now=1.0)
    f.lose(P, "gone", 2.0)
    f.again()
    launch(f, E, now=4.0)
    feed(f, E, out(1, 11, attempt=1, finish=FinishReason.LENGTH), now=5.0)
    outcome = f.outcome(5.0)
    assert (outcome.ttft_ms, outcome.tpot_ms, outcome.queue_ms, outcome.tokens) == (1000.0, 4000.0, 0.0, 2)


@given(st.data(), st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**32))
def test_whatever_the_order_no_token_is_lost_doubled_or_moved(data, length, handed, seed):
    """The prefiller speaks [0, handed) in order, the decoder the rest in order, both possibly also more than that."""
    handed = min(handed, length)
    text = list(range(length))
    extra = data.draw(st.integers(handed, length))  # how far the prefiller goes on
    back = data.draw(st.integers(0, handed))  # where the decoder begins
    rng = random.Random(seed)
    streams = {"p": chunks(text[:extra], 0, length, rng), "d": chunks(text[back:], back, length, rng)}
    f, got, ended = flight(), [], 0
    while any(streams.values()):
        name = rng.choice([n for n, rest in streams.items() if rest])
        output = streams[name].pop(0)
        for piece in f.accept(name, 1 if name == "p" else 5, output, 0.0):
            assert piece.start == len(got)
            got += piece.tokens
            ended += piece.finish is not None
        if ended:
            break
    assert got == text
    assert ended == 1


@given(st.integers(1, 20), st.integers(0, 2**32))
def test_whoever_dies_whenever_no_token_is_lost_doubled_or_moved(length, seed):
    """Places come and go; each goes on from what it was given, hands over after its first token or not at all, and dies
    at some point or not."""
    rng = random.Random(seed)
    text, got, ended = list(range(length)), [], 0
    f, attempts = flight(decode=rng.choice([None, D])), 0
    while not ended:
        pieces, begin, attempt = [], f.received, f.attempt
        middle = begin + 1 if f.next is not None and rng.random() < 0.7 else length
        streams = {P: numbered(chunks(text[begin:middle], begin, length, rng), attempt)}
        streams |= {D: numbered(chunks(text[middle:], middle, length, rng), attempt)}
        dies = rng.random() < 0.7 and attempts < 5
        while any(streams.values()) and not f.stranded and not ended:
            peer = rng.choice([p for p, rest in streams.items() if rest])
            if dies and rng.random() < 0.3:
                f.lose(peer, "it dies", 0.0)
                streams[peer] = []
                continue
            pieces = f.accept(peer.name, peer.incarnation, streams[peer].pop(0), 0.0)
            for piece in pieces:
                assert piece.start == len(got)
                got += piece.tokens
                ended += piece.finish is not None
        f.tick(1e9)
        if not ended:
            assert f.stranded, "nobody has it and nobody knows"
            f.again()
            attempts += 1
            sent = launch(f, P, rng.choice([None, D]))
            assert list(sent.generated) == got
    assert (got, ended) == (text, 1)


def numbered(outputs, attempt):
    return [replace(output, generation=attempt) for output in outputs]


def chunks(tokens, start, length, rng):
    outputs = []
    while tokens:
        size = rng.randint(1, min(3, len(tokens)))
        end = start + size == length
        outputs.append(out(start, *tokens[:size], finish=FinishReason.LENGTH if end else None))
        tokens, start = tokens[size:], start + size
    return outputs


# --- a beam search


def test_a_beam_search_stays_where_it_began_and_begins_anew_when_that_is_lost():
    asked = replace(REQUEST, params=SamplingParams(n=2, use_beam_search=True))
    f = flight(request=asked)
    assert (f.next, f.peers, f.route) == (None, [P], "p")
    assert feed(f, P, out(0)) == [(0, [], None)]  # its prompt was prefilled
    assert (f.first, f.received) == (0.0, 0)
    f.lose(P, "killed", 1.0)
    assert f.stranded
    f.again()
    assert launch(f, E, D, 2.0).generated == ()
    assert feed(f, E, out(0, attempt=1)) == [(0, [], None)]
    found = [Hypothesis([4, 5], None, FinishReason.LENGTH, None, -1.0)] * 2
    last = replace(out(0, finish=FinishReason.LENGTH, attempt=1), hypotheses=found)
    (piece,) = f.accept("e", 3, last, 3.0)
    assert piece.hypotheses == found
