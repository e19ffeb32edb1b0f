"""One sequence over two instances: order, doubles, losses."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import EngineFailure
from penstock.core.request import FinishReason, Request, TokenLogprobs, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import LEASE, Peer
from penstock.service.flight import Flight

P, D = Peer("p", 1, ""), Peer("d", 5, "")


def flight(decode=D, attempt=0):
    made = Flight(Request(id="r", prompt=[1], params=SamplingParams(), seed=0, stop_ids=frozenset(), max_tokens=99))
    made.attempt = attempt
    made.launch(P, decode)
    return made


def out(start, *tokens, finish=None, attempt=0):
    return TokenOutput("r", list(tokens), finish=finish, start=start, generation=attempt)


def feed(flight, peer, output, now=0.0):
    return [(o.start, o.tokens, o.finish) for o in flight.accept(peer.name, peer.incarnation, output, now)]


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


def test_what_is_of_another_attempt_life_or_instance_is_dropped():
    f = flight(attempt=2)
    assert feed(f, P, out(0, 10, attempt=1)) == []
    assert feed(f, Peer("p", 2, ""), out(0, 10, attempt=2)) == []
    assert feed(f, Peer("x", 1, ""), out(0, 10, attempt=2)) == []
    assert feed(f, P, out(0, 10, attempt=2)) == [(0, [10], None)]


def test_an_error_of_the_prefiller_counts_until_the_decoder_spoke():
    f = flight()
    feed(f, P, out(0, 10))
    feed(f, D, out(1, 11))
    assert feed(f, P, out(1, finish=FinishReason.ERROR)) == []
    with pytest.raises(EngineFailure):
        feed(f, D, out(2, finish=FinishReason.ERROR))
    f = flight()
    with pytest.raises(EngineFailure):
        feed(f, P, out(0, finish=FinishReason.ERROR))


@pytest.mark.parametrize(
    ("decode", "finish", "says"),
    [
        (None, FinishReason.ERROR, "gave this request up: the model computed something that is no number"),
        (D, FinishReason.ERROR, "no number, or its hand-over to d was lost"),
        (D, FinishReason.ABORT, "dropped this request, the request can be sent again"),
    ],
)
def test_the_client_is_told_no_more_than_is_known(decode, finish, says):
    with pytest.raises(EngineFailure, match=f"^p .*{says}$"):
        feed(flight(decode), P, out(0, finish=finish))


def test_alone_an_instance_takes_its_sequences_with_it():
    says = r"^p failed during this request \(burnt\), the request can be sent again$"
    with pytest.raises(EngineFailure, match=says):
        flight(decode=None).lose(P, "burnt", 0.0)


def test_a_lost_prefiller_does_not_hurt_what_decodes_elsewhere():
    f = flight()
    feed(f, P, out(0, 10))
    feed(f, D, out(1, 11))
    f.lose(P, "gone", 0.0)
    assert not f.overdue(1e9)
    assert feed(f, D, out(2, 12)) == [(2, [12], None)]
    assert f.peers == [D]


def test_after_a_loss_a_sign_of_life_is_waited_for():
    f = flight()
    feed(f, P, out(0, 10))
    f.lose(P, "gone", 100.0)
    assert not f.overdue(100.0 + LEASE)
    assert f.overdue(100.1 + LEASE)
    assert f.why_overdue().startswith("p failed during this request, and nothing came of it since")
    assert feed(f, D, out(1, 11), now=101.0) == [(1, [11], None)]  # it had been handed over
    assert not f.overdue(1e9)


def test_a_prefiller_that_goes_on_alone_must_keep_speaking():
    f = flight()
    f.lose(D, "gone", 100.0)
    assert feed(f, P, out(0, 10), now=104.0) == [(0, [10], None)]
    assert not f.overdue(104.0 + LEASE)
    assert f.overdue(104.1 + LEASE)


def test_a_lost_decoder_ends_what_it_decoded():
    f = flight()
    feed(f, D, out(0, 10))
    with pytest.raises(EngineFailure):
        f.lose(D, "gone", 0.0)


def test_tokens_that_nobody_can_send_any_more_end_it():
    f = flight()
    feed(f, D, out(1, 11))
    with pytest.raises(EngineFailure):
        f.lose(P, "gone", 0.0)
    f = flight()
    f.lose(P, "gone", 0.0)
    with pytest.raises(EngineFailure, match="first tokens"):
        feed(f, D, out(1, 11))
    f = flight()
    feed(f, D, out(1, 11), now=10.0)
    feed(f, D, out(2, 12), now=14.0)  # does not make the gap younger
    assert f.overdue(10.1 + LEASE)
    assert f.why_overdue().startswith("tokens of this request that p had computed did not come")


def test_another_place_is_another_attempt():
    f = flight()
    f.again()
    assert (f.attempt, f.peers, f.route) == (1, [], "")
    f.launch(D, None)
    assert f.route == "d"


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


def chunks(tokens, start, length, rng):
    outputs = []
    while tokens:
        size = rng.randint(1, min(3, len(tokens)))
        end = start + size == length
        outputs.append(out(start, *tokens[:size], finish=FinishReason.LENGTH if end else None))
        tokens, start = tokens[size:], start + size
    return outputs
