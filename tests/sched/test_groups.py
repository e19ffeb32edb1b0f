"""Load of data-parallel groups and of a device's units."""

from itertools import combinations, pairwise, product

from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.parallel.groups import LEAST_MS, SHARE, SPLIT, GroupLoad, Move, admit, even_out
from penstock.sched.parallel.units import UnitClass, alignment_loss, allocate, busiest, in_turn, spread_rows


def test_a_sequence_goes_where_most_is_free():
    assert admit([10, 30, 30], 20) == 1
    assert admit([10, 30, 30], 31) is None


def loads(*groups, room=10**6, ms=0.0):
    return [GroupLoad(tuple(enumerate(tokens, 100 * at)), room, ms) for at, tokens in enumerate(groups)]


def test_what_is_nearly_even_stays():
    assert even_out(loads([5000], [5000]), 1e-3) == []
    assert even_out(loads([5900], [5000]), 1e-3) == [], "0.45 ms over the mean"
    assert even_out(loads([60_000], [63_000]), 1e-3) == [], "1.5 ms, but 2.4 % of the mean"
    assert even_out(loads([5000]), 1.0) == []


def test_the_granularity_that_fits_best():
    # 20 ms and 10 ms: 5,000 tokens are to go
    assert even_out(loads([5000, 15_000], [10_000]), 1e-3) == [Move("sequence", 0, 1, (0,), 5000)]
    assert even_out(loads([20_000], [10_000]), 1e-3) == [Move("part", 0, 1, (0,), 4 * SPLIT)]
    assert even_out(loads([5000, 15_000], [10_000]), 1e-3, kinds=("part",)) == [Move("part", 0, 1, (1,), 4 * SPLIT)]
    # a group that has a prompt to read for 20 ms beside its decodes of 4 ms, and one that has nothing
    busy = [GroupLoad(((0, 2000), (1, 2000)), 0, 20.0), GroupLoad((), 10**6)]
    assert even_out(busy, 1e-3) == [Move("batch", 0, 1, (0, 1), 4000)]
    # a part costs 1 ms in every step: a sequence that is not quite as many does
    assert even_out(loads([4500, 15_500], [10_000]), 1e-3, part_ms=1.0) == [Move("sequence", 0, 1, (0,), 4500)]


def test_moves_go_where_there_is_room():
    groups = [GroupLoad(((0, 20_000),), 0), GroupLoad((), 100), GroupLoad(((1, 100),), 6000)]
    assert even_out(groups, 1e-3) == [Move("part", 0, 2, (0,), 5 * SPLIT)]
    assert even_out([GroupLoad(((0, 20_000),), 0), GroupLoad((), SPLIT - 1)], 1e-3) == []


@st.composite
def some_groups(draw):
    names = iter(range(1000))
    return [
        GroupLoad(
            tuple((next(names), draw(st.integers(1, 30_000))) for _ in range(draw(st.integers(0, 5)))),
            draw(st.sampled_from([0, 1000, 40_000, 10**6])),
            draw(st.sampled_from([0.0, 0.0, 10.0])),
        )
        for _ in range(draw(st.integers(1, 8)))
    ]


@given(some_groups(), st.sampled_from([1e-4, 1e-3]), st.sampled_from([0.0, 0.5]))
def test_moves_never_make_the_slowest_slower_nor_overfill_a_group(groups, token_ms, part_ms):
    moves = even_out(groups, token_ms, part_ms)
    times = [group.ms + token_ms * sum(tokens for _, tokens in group.sequences) for group in groups]
    mean, room = sum(times) / len(times), [group.room for group in groups]
    there = [dict(group.sequences) for group in groups]
    for move in moves:
        cost, slowest = part_ms * (move.kind == "part"), times[move.source]
        assert slowest == max(times)
        assert slowest > mean + max(LEAST_MS, SHARE * mean)
        times[move.source] += cost - move.tokens * token_ms
        times[move.target] += cost + move.tokens * token_ms
        assert max(times[move.source], times[move.target]) < slowest
        room[move.target] -= move.tokens
        held = [there[move.source].pop(sequence) for sequence in move.sequences]
        if move.kind == "part":
            assert move.tokens % SPLIT == 0
            assert move.tokens < held[0]
        else:
            assert move.tokens == sum(held)
    assert min(room) >= 0


@given(st.lists(st.integers(1, 30_000)), st.integers(1, 40), st.sampled_from([64, SPLIT]))
def test_every_token_is_in_one_piece_and_units_have_equally_many(lengths, units, split):
    spread = spread_rows(lengths, units, split)
    assert len(spread) == units
    pieces = sorted(piece for unit in spread for piece in unit)
    for row, length in enumerate(lengths):
        own = [piece for piece in pieces if piece.row == row]
        assert [piece.start for piece in own] == [0, *(piece.end for piece in own[:-1])]
        assert own[-1].end == length
        assert all(piece.start % split == 0 for piece in own)
    if lengths:
        share = sum(lengths) / units
        longest = max(piece.end - piece.start for piece in pieces)
        assert longest <= share + 1 + split
        assert busiest(spread) <= share + longest, "nobody gets more while another has less than the share"


def test_a_request_of_32k_tokens_on_24_units():
    """xLLM, section 5: a core's 32k tokens become 1.3k."""
    assert in_turn([32_768], 24) == 32_768
    assert busiest(spread_rows([32_768], 24, 64)) == 1408
    assert busiest(spread_rows([32_768], 24, SPLIT)) == 2 * SPLIT
    assert in_turn([1, 2, 3, 4, 5], 2) == 9


def every_split(units, operators):
    """All ways to give each operator at least one of so many units."""
    for cuts in combinations(range(1, units), operators - 1):
        ends = (0, *cuts, units)
        yield [b - a for a, b in pairwise(ends)]


@st.composite
def unit_classes(draw):
    work = draw(st.lists(st.sampled_from([1.0, 2.0, 3.5, 8.0, 30.0]) | st.floats(0.1, 50), min_size=1, max_size=3))
    return UnitClass(tuple(work), draw(st.integers(len(work), 8)), draw(st.sampled_from([1.0, 4.0])))


@given(st.lists(unit_classes(), min_size=1, max_size=2))
def test_no_other_allocation_of_all_units_is_better(classes):
    found = allocate(classes)
    assert [sum(units) for units in found] == [c.units for c in classes]
    ways = product(*(every_split(c.units, len(c.work)) for c in classes))
    assert alignment_loss(classes, found) == min(alignment_loss(classes, way) for way in ways)


def test_units_follow_work():
    matrices, vectors = UnitClass((30.0, 10.0), 24, 1.0), UnitClass((5.0, 5.0, 10.0), 48, 0.25)
    assert allocate([matrices, vectors]) == [[18, 6], [12, 12, 24]], "as with shares, where these are whole"
    # two units would do for the small operator to end with the other class; it has all that is left besides
    assert sum(allocate([UnitClass((1.0,), 10), UnitClass((8.0,), 1)])[0]) == 10
