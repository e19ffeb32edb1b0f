"""Experts that move: whatever ranks do, a switch is of all or of none."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.core.errors import ConfigError
from penstock.core.parallel import Placement, Switch
from penstock.sched.parallel.rebalancing import (
    ENOUGH,
    GAIN,
    PATIENCE,
    Abandon,
    EplbConfig,
    ExpertRanks,
    Prepare,
    Rebalancer,
    make_eplb,
)

RANKS = ExpertRanks(experts=6, layers=3, ranks=3, slots=3)
SKEWED = [9 * ENOUGH, 1, 1, 1, 1, 1]


def looking(counts, ranks=RANKS):
    """One that has seen these loads of every layer."""
    rebalancer = Rebalancer(ranks)
    assert rebalancer.tick(0.0) is None
    rebalancer.look([counts] * ranks.layers)
    return rebalancer


def test_a_skewed_layer_is_prepared_and_switched_when_all_are_ready():
    rebalancer = looking(SKEWED)
    order = rebalancer.tick(0.0)
    assert isinstance(order, Prepare)
    assert order.loads
    before = Placement.even(6, 3)
    assert rebalancer.placements == [before] * 3
    assert rebalancer.ready(0, order.version) is rebalancer.ready(0, order.version) is rebalancer.ready(2, 9) is None
    assert rebalancer.ready(2, order.version) is None
    switch = rebalancer.ready(1, order.version)
    assert switch == Switch(order.version, order.layer, rebalancer.placements[order.layer])
    assert before.changes(switch.placement) == list(order.loads)
    assert switch.placement.imbalance(SKEWED) < 1.05 < before.imbalance(SKEWED)
    assert rebalancer.tick(1.0) is None, "the next layer waits for the step that switches"
    rebalancer.switched(order.version)
    following = rebalancer.tick(1.0)
    assert following.layer != order.layer
    assert following.version == order.version + 1


def test_nothing_moves_for_little_gain_or_few_tokens():
    assert looking([ENOUGH] * 6).tick(0.0) is None, "even"
    assert looking([tokens // 10 for tokens in SKEWED]).tick(0.0) is None, "too few to know"
    # a fall of 5 % is not enough, and more is: 2 ranks of 2 slots, 0 and 1 together, and could be apart
    two = ExpertRanks(experts=4, layers=1, ranks=2, slots=2)
    for share, moves in ((1.1, False), (1.25, True)):
        counts = [round(ENOUGH * each) for each in (share, share, 1, 1)]
        order = looking(counts, two).tick(0.0)
        assert (order is not None) == moves
        assert (Placement.even(4, 2).imbalance(counts) > 1 / (1 - GAIN)) == moves


def test_a_rank_that_fails_in_between_leaves_everything_as_it_was():
    for fail in (
        lambda rebalancer, version: rebalancer.failed(version),
        lambda rebalancer, version: rebalancer.lost(1),
        lambda rebalancer, version: rebalancer.tick(PATIENCE),
    ):
        rebalancer = looking(SKEWED)
        order = rebalancer.tick(0.0)
        rebalancer.ready(0, order.version)
        assert fail(rebalancer, order.version) == Abandon(order.version, order.layer)
        assert rebalancer.placements == [Placement.even(6, 3)] * 3
        assert rebalancer.ready(1, order.version) is rebalancer.ready(2, order.version) is None, "too late"
        assert rebalancer.tick(2 * PATIENCE) is None, "other layers wait for the next look"
        rebalancer.check()


def test_nothing_moves_while_a_rank_is_lost():
    rebalancer = looking(SKEWED)
    rebalancer.lost(2)
    assert rebalancer.tick(0.0) is None
    rebalancer.back(2)
    assert isinstance(rebalancer.tick(1.0), Prepare)


def test_an_order_to_switch_is_not_taken_back():
    rebalancer = looking(SKEWED)
    order = rebalancer.tick(0.0)
    for rank in range(3):
        rebalancer.ready(rank, order.version)
    assert rebalancer.lost(0) is rebalancer.failed(order.version) is rebalancer.tick(2 * PATIENCE) is None
    assert rebalancer.placements[order.layer] != Placement.even(6, 3), "it starts again with the new one"
    rebalancer.check()


def test_placements_follow_traffic():
    rebalancer = Rebalancer(RANKS)
    for counts in (SKEWED, SKEWED[::-1]):
        rebalancer.look([counts] * 3)
        while (order := rebalancer.tick(0.0)) is not None:
            assert [rebalancer.ready(rank, order.version) for rank in range(3)][-1] is not None
            rebalancer.switched(order.version)
        assert all(placement.imbalance(counts) < 1.05 for placement in rebalancer.placements)


def test_a_configuration_is_as_vllm_has_it():
    assert make_eplb("{}") == EplbConfig(window_size=1000, step_interval=3000, num_redundant_experts=0)
    asked = '{"num_redundant_experts": 32, "window_size": 10, "log_balancedness": true, "use_async": true}'
    assert make_eplb(asked) == EplbConfig(window_size=10, num_redundant_experts=32, log_balancedness=True)
    for asked, allowed in (
        ('{"num_redundant_experts": -1}', '"num_redundant_experts": 0 to'),
        ('{"use_async": false}', '"use_async": true'),
        ('{"log_balancedness": 1}', '"log_balancedness": true or false'),
        ("[]", 'a JSON object such as {"num_redundant_experts": 8}'),
    ):
        with pytest.raises(ConfigError, match="eplb-config: .*, allowed is " + allowed):
            make_eplb(asked)


@pytest.mark.parametrize("groups", [1, 8])
def test_one_rebalance_of_a_drawn_zipf_leaves_a_tenth(groups):
    """DeepSeek-V3's experts on 64 ranks; of prefill in 8 groups on 8 hosts, whose own loads differ by more."""
    rng, ranks = np.random.default_rng(3), ExpertRanks(experts=256, layers=2, ranks=64, slots=6, groups=groups, hosts=8)
    popularity = [rng.permutation(1 / np.arange(1, 257)) for _ in range(2)]
    if groups > 1:  # what is popular is spread over groups by the router's own balance, as it was trained for
        popularity = [layer / np.repeat(layer.reshape(8, 32).sum(1), 32) for layer in popularity]
    draw = [rng.multinomial(8 * 200_000, layer / layer.sum()).tolist() for layer in popularity]
    rebalancer = Rebalancer(ranks)
    rebalancer.look(draw)
    while (order := rebalancer.tick(0.0)) is not None:
        for rank in range(64):
            rebalancer.ready(rank, order.version)
        rebalancer.switched(order.version)
    later = [rng.multinomial(8 * 200_000, layer / layer.sum()).tolist() for layer in popularity]
    before = [Placement.even(256, 64).imbalance(counts) for counts in later]
    after = [placement.imbalance(counts) for placement, counts in zip(rebalancer.placements, later, strict=True)]
    assert min(before) > 1.5
    assert max(after) < 1.1


class Moves(RuleBasedStateMachine):
    """Three ranks, of which each hears orders and answers when it likes; what each has in its slots and its spare
    memory is followed here."""

    def __init__(self):
        super().__init__()
        self.rebalancer, self.now = Rebalancer(RANKS), 0.0
        self.prepared = None  # the order, from `Prepare` to `Switch` or `Abandon`
        self.switching = None
        self.answered = set()
        self.before = list(self.rebalancer.placements)
        self.lost = set()

    def follow(self, order):
        if isinstance(order, Prepare):
            assert self.prepared is self.switching is None, "one at a time"
            assert not self.lost
            self.prepared, self.answered = order, set()
            self.before = list(self.rebalancer.placements)
        elif isinstance(order, Switch):
            assert self.answered == {0, 1, 2}
            assert order.version == self.prepared.version
            assert self.before[order.layer].changes(order.placement) == list(self.prepared.loads)
            self.prepared, self.switching = None, order
            self.before = list(self.rebalancer.placements)
        elif isinstance(order, Abandon):
            assert order.version == self.prepared.version
            self.prepared = None

    @rule(
        skew=st.permutations([6, 5, 1, 1, 0, 0]),
        scale=st.sampled_from([1, ENOUGH // 2, 3 * ENOUGH]),
        layers=st.sets(st.integers(0, 2)),
    )
    def a_window_ends(self, skew, scale, layers):
        self.rebalancer.look([[scale * s if at in layers else 0 for s in skew] for at in range(3)])

    @rule(seconds=st.sampled_from([0.1, PATIENCE]))
    def time_passes(self, seconds):
        self.now += seconds
        self.follow(self.rebalancer.tick(self.now))

    @rule(rank=st.integers(0, 2), late=st.booleans())
    def a_rank_is_ready(self, rank, late):
        version = self.prepared.version if self.prepared else 0
        if rank not in self.lost and self.prepared and not late:
            self.answered.add(rank)
            self.follow(self.rebalancer.ready(rank, version))
        elif late:
            assert self.rebalancer.ready(rank, version - 1) is None

    @precondition(lambda self: self.prepared)
    @rule()
    def a_rank_fails(self):
        self.follow(self.rebalancer.failed(self.prepared.version))
        assert self.prepared is None

    @rule(rank=st.integers(0, 2))
    def a_rank_ends(self, rank):
        self.lost.add(rank)
        self.follow(self.rebalancer.lost(rank))
        assert self.prepared is None

    @rule(rank=st.integers(0, 2))
    def a_rank_is_back(self, rank):
        self.lost.discard(rank)
        self.rebalancer.back(rank)

    @precondition(lambda self: self.switching)
    @rule()
    def the_step_begins(self):
        self.rebalancer.switched(self.switching.version)
        self.switching = None

    @invariant()
    def only_a_switch_changes_placements(self):
        assert self.rebalancer.placements == self.before
        self.rebalancer.check()


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
