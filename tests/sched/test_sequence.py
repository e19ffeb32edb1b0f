"""What a step is told of a sequence: which tokens of the prompt to report, and what crosses the wire."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.plan import StepResult
from penstock.core.request import TokenLogprobs
from penstock.core.thinking import Thinking
from penstock.core.wire import codec
from penstock.core.wire.engine import Enqueue, StepReport, decode_command, decode_event
from penstock.core.wire.handoff import Lease, Reserve, decode_peer
from penstock.kv.keys import root_key, salted
from penstock.kv.pool import BlockPool
from penstock.sched.local import Limits, Scheduler
from tests.helpers.engines import make_request
from tests.helpers.scripted import STATS


@given(st.integers(1, 300), st.integers(1, 100), st.booleans())
def test_every_token_of_the_prompt_but_the_first_is_reported_once(length, budget, prefix_cache):
    limits = Limits(token_budget=budget, max_sequences=1, max_model_len=400)
    scheduler = Scheduler(limits, BlockPool(range(16)), prefix_cache=prefix_cache)
    prompt = [i % 50 for i in range(length)]
    for name in "ab":  # the second could find the first one's blocks
        scheduler.add(make_request(name, prompt, prompt_logprobs=0, max_tokens=2))
        while scheduler.has_work:
            plan = scheduler.schedule()
            reports = {
                s.request_id: [TokenLogprobs(float(t), s.start + i, []) for i, t in enumerate(s.targets, start=1)]
                for s in plan.sequences
                if s.targets
            }
            sampled = sum(s.sample for s in plan.sequences)
            for output in scheduler.update(plan, StepResult([[7]] * sampled, [None] * sampled, reports)):
                assert (output.prompt_logprobs is not None) == (output.start == 0)
                if output.prompt_logprobs is not None:
                    # (token, its position)
                    assert [(r.chosen, r.rank) for r in output.prompt_logprobs] == list(
                        zip(map(float, prompt[1:]), range(1, length), strict=True)
                    )
            scheduler.check()


def test_a_salt_changes_the_root_and_the_empty_one_does_not():
    root = root_key("model", "bfloat16")
    roots = [root, salted(root, "a"), salted(root, "b"), salted(root_key("other"), "a")]
    assert len(set(roots)) == len(roots)
    assert salted(root, "") == root


def test_reserved_room_finds_blocks_of_its_own_salt_only():
    limits = Limits(token_budget=512, max_sequences=4, max_model_len=512)
    scheduler = Scheduler(limits, BlockPool(range(16)), root=b"root")
    mine = replace(make_request("a", [1] * 200, max_tokens=1), cache_salt="mine")
    scheduler.add(mine)
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult([[1]], [None]))
    for salt, have in (("mine", 3), ("yours", 0), ("", 0)):
        reservation = scheduler.reserve(replace(mine, id="b", cache_salt=salt))
        assert reservation is not None
        assert reservation.have == have
        scheduler.reservations.cancel(reservation)


def test_everything_about_a_request_crosses_the_wire():
    params = {"min_tokens": 2, "bad_words": ["x"], "allowed_token_ids": [1, 2], "prompt_logprobs": 3}
    params["structured_outputs"] = {"json": {"enum": ["ü", 1]}, "disable_any_whitespace": True}
    params["thinking"] = {"start": [3], "end": [4, 5], "budget": 6}
    request = replace(make_request("r", [1, 2], **params), bad_words=((5, 6), (7,)), cache_salt="s", generated=(1,))
    for back in (
        decode_command(codec.encode(Enqueue(1, request))).request,
        decode_peer(codec.encode(Reserve(Lease("r", 0), request, "f"))).request,
    ):
        assert back.params == request.params
        assert back.params.thinking == Thinking(start=(3,), end=(4, 5), budget=6)
        assert back.params.structured_outputs.json == '{"enum":["ü",1]}'
        assert (back.bad_words, back.cache_salt, back.stop_ids) == (request.bad_words, "s", request.stop_ids)
    limits = Limits(token_budget=8, max_sequences=1, max_model_len=64)
    scheduler = Scheduler(limits, BlockPool(range(4)))
    scheduler.add(replace(request, generated=()))
    plan = scheduler.schedule()
    reports = {"r": [TokenLogprobs(-1.5, 2, [(3, -0.5)])]}
    outputs = scheduler.update(plan, StepResult([[2]], [None], reports))
    assert decode_event(codec.encode(StepReport(1, outputs, STATS))).outputs == outputs
    assert outputs[0].prompt_logprobs == reports["r"]
