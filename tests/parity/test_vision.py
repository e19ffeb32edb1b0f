"""Models that see: as transformers does, and the same tokens however a request runs."""

import random
import threading
from dataclasses import replace

import pytest
import torch

from penstock.core.errors import InvalidRequest
from penstock.core.plan import BLOCK_TOKENS, Encode, SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import KVCache, make_layout
from penstock.engine.media import MediaEmbeddings
from penstock.nn import native
from penstock.nn.batch import Batch
from penstock.nn.loader import load_model
from penstock.nn.mrope import rotary_positions
from penstock.sched.local.limits import StepBudget
from tests.helpers.checkpoints import auto_class, write_checkpoint
from tests.helpers.engines import Collector, make_engine, make_request
from tests.helpers.pictures import IMAGE, picture, seeing
from tests.helpers.ranks import load_shards, make_parallel_engine

transformers = pytest.importorskip("transformers")
OLD = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)  # puts what follows a video elsewhere
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 7}
SMALL, LARGE = picture(3, 5, 1), picture(9, 7, 2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model") / "qwen2.5-vl", "qwen2.5-vl")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint, DEVICE)


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 300) for _ in range(length)]


def theirs(checkpoint, request):
    """Logits of transformers, of which the media's tokens are of kinds 1 and 2."""
    model = auto_class(checkpoint.name).from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokens = torch.tensor([request.prompt])
    kinds = torch.zeros_like(tokens)
    given = {"image": ([], []), "video": ([], [])}
    for span, pixels in zip(request.media, request.pixels, strict=True):
        kinds[0, span.start : span.start + span.length] = 1 if span.kind == "image" else 2
        frames = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(*span.shape, 3).permute(0, 3, 1, 2)
        values, grid = given[span.kind]
        values.append(patches_of(frames))
        grid.append([span.grid[0], 2 * span.grid[1], 2 * span.grid[2]])
    more = {}
    for kind, names in (
        ("image", ("pixel_values", "image_grid_thw")),
        ("video", ("pixel_values_videos", "video_grid_thw")),
    ):
        if given[kind][0]:
            more |= dict(zip(names, (torch.cat(given[kind][0]), torch.tensor(given[kind][1])), strict=True))
    if given["video"][0]:
        intervals = [span.interval for span in request.media if span.kind == "video"]
        more["second_per_grid_ts"] = torch.tensor(intervals) / model.config.vision_config.tokens_per_second
    return model(tokens, mm_token_type_ids=kinds, **more).logits[0]


def patches_of(frames):
    """By transformers' own processor, of frames that need no other size."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    own = Qwen2VLImageProcessorPil(size={"shortest_edge": 1, "longest_edge": 1 << 30})
    if len(frames) == 1:
        return own(frames[0], return_tensors="pt")["pixel_values"]
    values = [own(frame, return_tensors="pt")["pixel_values"].view(-1, 3, 2, 196)[:, :, 0] for frame in frames]
    pairs = [torch.stack((a, b), dim=2).flatten(1) for a, b in zip(values[::2], values[1::2], strict=True)]
    return torch.cat(pairs)


def ours(model, request, chunks):
    layout = make_layout(model.config, model.dtype, "block", "")
    cache = KVCache.on_device(layout, 16, DEVICE)
    cache.slots.zero_()
    media, spans = MediaEmbeddings(), zip(request.media, request.pixels, strict=True)
    media.follow(model, StepPlan((), encodes=tuple(Encode("r", *each) for each in spans)))
    rows, done = [], 0
    for chunk in [*chunks, len(request.prompt)]:
        own = request.prompt[done : done + chunk]
        if not own:
            break
        end = done + len(own)
        blocks = tuple(range(-(-end // BLOCK_TOKENS)))
        step = SequenceStep("r", done, own, blocks, 1, SamplingParams(), 0)
        step.media = request.media
        batch = Batch([step], DEVICE)
        batch.seen = media.seen(model, batch)
        rows.append(model.logits(model(batch, cache.layers)))
        done = end
    return torch.cat(rows)


ASKED = {
    "image": [text(9, 1), SMALL, text(20, 2)],
    "images": [LARGE, text(5, 3), SMALL, text(1, 8), SMALL, text(1, 4)],
    "video": [text(3, 5), (picture(3, 4, 3, frames=6), 1.5), text(30, 6), SMALL, text(4, 7)],
    "slow video": [text(3, 5), (picture(2, 2, 3, frames=4), 0.6), text(9, 6)],
}


@torch.inference_mode()
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.skipif(OLD and name == "video", reason="too old")) for name in ASKED]
)
def test_logits(checkpoint, model, name):
    request = seeing("r", ASKED[name])
    expected = theirs(checkpoint, request)
    for chunks in ((), (11, 1, 30, 7)):
        assert (ours(model, request, chunks).cpu() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("beside", [False, True])
def test_same_tokens_however_it_runs(checkpoint, model, beside):
    if DEVICE.type == "cuda":  # as it is served there
        model = load_model(checkpoint, DEVICE, torch.bfloat16)

    def mine(**options):
        return seeing("mine", [text(20, 1), LARGE, text(5, 2), SMALL, text(9, 3)], **SAMPLED, **options)

    alone = Collector(make_engine(model)).run(mine())["mine"]
    assert len(set(alone)) > 3
    others = [make_request(f"r{i}", text(7 + 23 * i, i), seed=i, temperature=1.0) for i in range(5)]
    others += [seeing(f"s{i}", [text(3 + i, i), picture(2 + i, 3, i), text(4, i)], seed=i) for i in range(3)]
    assert Collector(make_engine(model, beside=beside)).run(*others[:6], mine(), *others[6:])["mine"] == alone
    for budget in (1, 7, 64):
        assert Collector(make_engine(model, budget=budget, sequences=1, beside=beside)).run(mine())["mine"] == alone
    assert Collector(make_engine(model, ahead=False, beside=beside)).run(mine())["mine"] == alone
    assert Collector(make_engine(model, graph_mode="eager", beside=beside)).run(mine())["mine"] == alone
    for prefix_cache in (True, False):
        assert preempted(model, mine, prefix_cache, beside=beside) == alone
    for room in (63, 78, 1000):  # one after the other, or both at once
        piecewise = make_engine(model, budget=16, media_tokens=room, beside=beside)
        assert Collector(piecewise).run(mine(), *others)["mine"] == alone
    with pytest.raises(InvalidRequest, match=r"image 0: 63 tokens, allowed are at most 62.*media-cache-memory"):
        make_engine(model, media_tokens=62).add(mine())
    beams = seeing("mine", [text(20, 1), SMALL, text(9, 3)], n=3, use_beam_search=True, max_tokens=8)
    Collector(make_engine(model, beside=beside)).run(beams)


def preempted(model, mine, prefix_cache, **options):
    crowded = Collector(make_engine(model, blocks=8, model_len=512, prefix_cache=prefix_cache, **options))
    for i in range(2):
        crowded.engine.add(make_request(f"urgent{i}", text(100, i), max_tokens=120, priority=-1))
    crowded.engine.add(mine())
    while not crowded.tokens.get("mine"):
        crowded.step()
    assert len(crowded.tokens["mine"]) < 24
    before = crowded.engine.scheduler.counters.preemptions
    crowded.engine.add(make_request("bully", text(150, 5), max_tokens=8, priority=-2))
    while crowded.engine.scheduler.counters.preemptions == before:
        crowded.step()
    return crowded.run()["mine"]


def test_steps_go_on_while_an_image_is_looked_at_beside_them(model, monkeypatch):
    mine = seeing("mine", [text(20, 1), LARGE, text(9, 3)], **SAMPLED)
    alone = Collector(make_engine(model)).run(mine)["mine"]
    look_at, gate = model.look_at, threading.Event()
    monkeypatch.setattr(model, "look_at", lambda *image: gate.wait() and look_at(*image))
    collector = Collector(make_engine(model, beside=True))
    engine = collector.engine
    engine.add(mine)
    collector.engine.add(make_request("text", text(30, 1)))
    while collector.finish.get("text") is None:
        collector.step()
    assert "mine" not in collector.tokens
    assert (engine.awaits_encodes, engine.at_rest, engine.scheduler.num_waiting) == (True, False, 1)
    gate.set()
    assert collector.run()["mine"] == alone
    gate.clear()
    engine.add(seeing("gone", [SMALL, [5]]))
    engine.begin()
    engine.end(wait=True)
    engine.cancel(["gone"])
    assert not engine.at_rest, "it is being looked at"
    gate.set()
    engine.clear_cache()
    assert engine.at_rest
    assert [each.request_id for each in engine.take_looked()] == ["mine", "gone"]


def test_what_fails_beside_steps_fails_the_engine_and_is_known(model, monkeypatch):
    mine = seeing("mine", [text(20, 1), LARGE, text(5, 2), SMALL, text(9, 3)], **SAMPLED)
    alone = Collector(make_engine(model)).run(mine)["mine"]
    look_at, failures = model.look_at, [MemoryError("no room to look")]

    def fails(*image):
        if failures:
            raise failures.pop()
        return look_at(*image)

    monkeypatch.setattr(model, "look_at", fails)
    collector = Collector(make_engine(model, beside=True))
    with pytest.raises(MemoryError, match="no room to look"):
        collector.run(mine)
    assert "mine" in collector.engine.at_work
    assert collector.run()["mine"] == alone


def test_prefixes_are_found_by_what_is_seen(model):
    """The placeholders are the same tokens, whatever they stand for."""
    collector = Collector(make_engine(model))
    asked = [text(20, 1), LARGE, text(70, 2)]
    first = collector.run(seeing("first", asked))["first"]
    assert collector.run(seeing("again", asked))["again"] == first
    worker = collector.engine.executor.worker
    assert collector.cached["again"] == 152
    assert worker.media.looked == 1
    other = [text(20, 1), picture(9, 7, 3), text(70, 2)]
    found = collector.run(seeing("other", other))["other"]
    assert collector.cached["other"] == 0
    assert found == Collector(make_engine(model, prefix_cache=False)).run(seeing("other", other))["other"] != first
    moved = [text(40, 4), LARGE, text(9, 2)]
    collector.run(seeing("moved", moved))
    assert worker.media.looked == 2, "its embeddings were kept"


def test_what_is_kept_is_bounded(model):
    collector = Collector(make_engine(model, prefix_cache=False, media_tokens=3 * 15))  # three small ones
    media, encodes = collector.engine.executor.worker.media, collector.engine.scheduler.encodes
    for turn, i in enumerate((1, 2, 3, 1, 4, 2)):
        collector.run(seeing(f"r{turn}", [picture(3, 5, i), [5]], max_tokens=1))
        encodes.check()
        assert len(media) <= 3
    assert (media.looked, encodes.found) == (5, 1), "the fourth took the place of the second"
    collector.engine.clear_cache()
    collector.run(seeing("again", [picture(3, 5, 2), [5]], max_tokens=1))
    assert (len(media), media.looked) == (1, 6), "what was forgotten is looked at again"


def test_how_much_a_step_encodes_is_found_by_what_it_takes(model):
    """Twice as much as before at most, as long as that is within the limit."""
    for limit, least, most in ((60.0, 513, 1024), (1e-9, 64, 64)):
        engine = make_engine(model, prefix_cache=False)
        engine._encode_budget = StepBudget(1, 1024, limit)
        engine.scheduler.limits = replace(engine.scheduler.limits, encode_budget=64)
        collector = Collector(engine)
        for turn in range(4):
            parts = [part for i in range(9) for part in (picture(9, 7, 10 * turn + i), [5])]
            collector.run(seeing(f"r{turn}", parts, max_tokens=1))
        assert least <= engine.scheduler.limits.encode_budget <= most


@pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks are on the CPU")
def test_two_ranks_say_what_one_says(checkpoint, model):
    asked = [seeing(name, parts, max_tokens=10) for name, parts in ASKED.items()]
    one = Collector(make_engine(model)).run(*asked)
    assert Collector(make_parallel_engine(load_shards(checkpoint, 2))).run(*asked) == one


def test_positions_behind_a_long_video():
    """Behind the greatest position in it, as the models' own code has it, so that a token's does not depend on whether
    it was in the prompt."""
    request = seeing("r", [[1, 2], (picture(1, 2, 3, frames=6), 4.5), [3, 4]])
    assert rotary_positions(request.media, 0, 10).tolist() == [
        [0, 1, 2, 2, 6, 6, 11, 11, 12, 13],
        [0, 1, 2, 2, 2, 2, 2, 2, 12, 13],
        [0, 1, 2, 3, 2, 3, 2, 3, 12, 13],
    ]
    for start in range(10):
        for end in range(start + 1, 11):
            whole = rotary_positions(request.media, 0, 12)
            assert torch.equal(rotary_positions(request.media, start, end - start), whole[:, start:end])


def test_placeholders_without_media_are_tokens(model):
    """As transformers has it."""
    collector = Collector(make_engine(model))
    assert len(collector.run(make_request("r", [5, IMAGE, IMAGE, 6]))["r"]) == 24


def test_what_became_of_images_is_told(model):
    """Of each answer: cached, found, looked at, and for how long; and what the predictor knows of it."""
    engine = make_engine(model, media_tokens=100)
    said = {}

    def ask(name, parts):
        engine.add(seeing(name, parts, max_tokens=2))
        while name not in said:
            said.update({o.request_id: o.timing.images for o in engine.step()[0] if o.finish is not None})
        return said[name]

    assert engine.encode_ms is None
    first = ask("first", [text(70, 1), picture(3, 5, 1), text(60, 2), picture(3, 5, 2)])
    assert (first.count, first.cached, first.looked, first.found) == (2, 0, 2, 0)
    assert first.encoding > 0
    assert engine.encode_ms == pytest.approx(first.encoding / 30 * 1e3, rel=0.9)
    again = ask("again", [text(70, 1), picture(3, 5, 1), text(60, 2), picture(3, 5, 2), [5]])
    assert (again.cached, again.looked, again.found) == (2, 0, 0)
    other = ask("other", [text(9, 3), picture(3, 5, 2), picture(3, 5, 3)])
    assert (other.cached, other.looked, other.found) == (0, 1, 1)
    engine.add(make_request("text", [1, 2, 3], max_tokens=1))
    (output,) = engine.step()[0]
    assert output.timing.images is None
    encodes = engine.scheduler.encodes
    assert (encodes.looked, encodes.wanted, encodes.found) == (3, 4, 1)
    assert encodes.seconds == pytest.approx(first.encoding + other.encoding)
