"""How embeddings are made of prompts: as checkpoints want them, and on whichever engine is there."""

import json

import pytest

from penstock.core.errors import ConfigError, InvalidRequest
from penstock.core.request import FinishReason, Pooling, Timing, TokenOutput
from penstock.core.sampling import SamplingParams
from penstock.core.wire.engine import Enqueue, Failed
from penstock.service.embedding import EmbeddingDefaults, finished, read_embedding
from tests.helpers.frontends import run, value
from tests.helpers.scripted import ready
from tests.helpers.waiting import until

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}


def folder(path, modules, pooling=None):
    (path / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def test_without_anything_said_it_is_the_last_token_normalised(tmp_path):
    assert read_embedding(tmp_path) == EmbeddingDefaults("last", normalize=True)


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (
            [TRANSFORMER, POOLING, NORMALIZE],
            {"word_embedding_dimension": 64, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True},
            EmbeddingDefaults("last", normalize=True),
        ),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True}, EmbeddingDefaults("mean", normalize=False)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "mean"}, EmbeddingDefaults("mean", normalize=False)),
        ([TRANSFORMER, NORMALIZE], None, EmbeddingDefaults("last", normalize=True)),
    ],
)
def test_what_sentence_transformers_says_holds_unless_another_was_asked_for(tmp_path, modules, pooling, expected):
    folder(tmp_path, modules, pooling)
    assert read_embedding(tmp_path) == expected
    for asked in ("last", "mean"):
        assert read_embedding(tmp_path, asked) == EmbeddingDefaults(asked, normalize=True)


@pytest.mark.parametrize(
    ("modules", "pooling", "names"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "cls_token"),
        ([TRANSFORMER, POOLING], {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, "mean_tokens and"),
        ([TRANSFORMER, POOLING], {}, "no pooling"),
        ([TRANSFORMER, POOLING | {"path": "../elsewhere"}], None, "outside"),
        ([TRANSFORMER, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], None, "Dense"),
        ([7], None, "modules.json"),
        ({}, None, "array"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, modules, pooling, names):
    folder(tmp_path, modules, pooling)
    with pytest.raises(ConfigError, match=names):
        read_embedding(tmp_path)
    assert read_embedding(tmp_path, "mean").pooling == "mean"


def test_vectors_are_cut_and_then_normalised():
    assert finished([3.0, 4.0, 12.0], 2, True) == [0.6, 0.8]
    assert finished([3.0, 4.0, 12.0], 2, False) == [3.0, 4.0]
    assert finished([0.0, 0.0], None, True) == [0.0, 0.0]


# --- through a frontend

GIVES = {"embedding_size": 2}


def embed(frontend, prompts, pooling: Pooling = "last"):
    return frontend.submit(prompts, SamplingParams(), request_id="r", pooling=pooling)


def output(request, generation=0):
    timing = Timing(queue=0.25, prefill=0.5, decode=0.0)
    return TokenOutput(
        request.id, [], finish=FinishReason.STOP, generation=generation, embedding=[3.0, 4.0], timing=timing
    )


def test_embeddings_come_as_they_are_ready_and_each_prompt_is_a_request_of_its_own(tokenizer):
    async def scenario(frontend, channel, clock):
        channel.say(ready(life=2, **GIVES))
        await until(lambda: frontend.embedding_size == 2)
        channel.life = 2
        frontend.placement.prefill = [ready(life=2).peer]
        with embed(frontend, [[1] * 100, [2]]) as generation:  # as long as the model allows
            await until(lambda: len(channel.enqueued()) == 2)
            first, second = channel.enqueued()
            assert (first.pooling, first.max_tokens, first.stop_ids) == ("last", 0, frozenset())
            assert [place.max_tokens for place in frontend.placement.asked] == [0, 0]
            clock.advance(2.0)
            channel.report(output(second))
            channel.report(output(first))
            found = await generation.whole()
        assert [(delta.index, [*delta.embedding]) for delta in found] == [(0, [3.0, 4.0]), (1, [3.0, 4.0])]
        assert (generation.usage.prompt_tokens, generation.usage.completion_tokens) == (101, 0)
        assert [outcome.tokens for outcome in frontend.placement.outcomes] == [0, 0]
        assert value(frontend, "penstock:request_success_total", finished_reason="stop") == 2
        assert value(frontend, "penstock:request_generation_tokens_count") == 0
        assert not channel.cancelled()

    run(tokenizer, scenario)


def test_it_runs_where_prompts_are_prefilled_and_again_elsewhere_after_a_loss(tokenizer):
    async def scenario(frontend, channels, clock):
        for channel in channels.values():
            channel.life = 2
            channel.say(ready(channel.name, 2, **GIVES))
        await until(lambda: frontend.embedding_size == 2)
        frontend.placement.prefill = [ready(name, 2).peer for name in "ab"]
        frontend.placement.decode = ready("d", 2).peer
        with embed(frontend, [[1, 2]], "mean") as generation:
            await until(channels["a"].enqueued)
            (command,) = (c for c in channels["a"].sent if isinstance(c, Enqueue))
            assert not command.route
            channels["a"].say(Failed("out of memory"))
            await until(channels["b"].enqueued)
            (again,) = channels["b"].enqueued()
            assert (again.prompt, again.pooling, again.generated) == ([1, 2], "mean", ())
            channels["b"].report(output(again, generation=1))
            (delta,) = await generation.whole()
        assert [*delta.embedding] == [3.0, 4.0]

    run(tokenizer, scenario, "a", "b", "d", decode="d")


def test_engines_say_what_they_can_do(tokenizer):
    async def scenario(frontend, channel, clock):
        with pytest.raises(InvalidRequest, match="give no embeddings"):
            embed(frontend, [[1]])
        channel.say(ready(life=2, generates=False, **GIVES))
        await until(lambda: frontend.embedding_size == 2)
        with pytest.raises(InvalidRequest, match="without a head"):
            frontend.submit([[1]], SamplingParams(), request_id="r")

    run(tokenizer, scenario)
