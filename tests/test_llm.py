"""The offline API."""

import numpy as np
import pytest
import torch

from penstock import LLM, BeamSearchParams, SamplingParams
from penstock.core.errors import ConfigError, InvalidRequest, PromptTooLong, Unavailable
from penstock.llm import _engine_options

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm():
    return LLM("demo", dtype="float32", max_model_len=512, max_num_batched_tokens=256, max_num_seqs=16)


def test_forms_of_a_prompt(llm):
    ids = llm.tokenizer.encode("import os")
    forms = ["import os", ids, tuple(ids), np.array(ids), {"prompt": "import os"}, {"prompt_token_ids": ids}]
    alone = [llm.generate(form, GREEDY)[0] for form in forms]
    together = llm.generate(forms, GREEDY)
    assert len({o.text for o in alone + together}) == 1
    assert alone[0].outputs[0].token_ids == together[0].outputs[0].token_ids
    assert alone[0].prompt == "import os"


@pytest.mark.parametrize("prompt", [[[1.5, 2]], [[True, 2]], [{"text": "x"}], [None], ""])
def test_other_forms_are_refused(llm, prompt):
    with pytest.raises(InvalidRequest):
        llm.generate(prompt, GREEDY)


def test_parameters_per_prompt_and_several_outputs(llm):
    params = [GREEDY, SamplingParams(n=3, seed=4, temperature=1.0, max_tokens=12, logprobs=2)]
    one, many = llm.generate(["a", "b"], params)
    assert len(one.outputs) == 1
    assert len({o.text for o in many.outputs}) > 1
    assert all(len(o.logprobs) == len(o.token_ids) for o in many.outputs)
    with pytest.raises(InvalidRequest, match="params: 2 for 1"):
        llm.generate("a", params)


def test_prompts_are_embedded(llm):
    ids = llm.tokenizer.encode("import os")
    one, other = llm.embed(["import os", ids])
    assert one.embedding == other.embedding
    assert (one.prompt, one.prompt_token_ids) == ("import os", ids)
    assert len(one.embedding) == llm.embedding_size
    assert np.linalg.norm(one.embedding) == pytest.approx(1)
    (raw,) = llm.embed("import os", normalize=False)
    assert np.array(raw.embedding) / np.linalg.norm(raw.embedding) == pytest.approx(np.array(one.embedding))
    (few,) = llm.embed("import os", dimensions=3)
    assert few.embedding == pytest.approx(np.array(one.embedding[:3]) / np.linalg.norm(one.embedding[:3]))
    (whole,) = llm.embed([[1] * 512])
    assert len(whole.prompt_token_ids) == 512, "no room is needed beside it"
    (cut,) = llm.embed([[2] * 600], truncate_prompt_tokens=-1)
    assert len(cut.prompt_token_ids) == 512
    with pytest.raises(PromptTooLong):
        llm.embed(["a", [1] * 513])
    with pytest.raises(InvalidRequest, match="dimensions"):
        llm.embed("a", dimensions=llm.embedding_size + 1)
    assert not llm.engine.has_work
    with pytest.raises(ConfigError, match="pooling"):
        LLM("demo", pooling="max")
    with pytest.raises(ConfigError, match=r"override_generation_config: .*'heat'.*, allowed is a JSON object of temp"):
        LLM("demo", override_generation_config={"heat": 1})


def test_stop_strings_and_chat(llm):
    free = llm.generate("import os", SamplingParams(temperature=0.0, max_tokens=30))[0]
    stop = free.text[6:9]
    stopped = llm.generate("import os", SamplingParams(temperature=0.0, max_tokens=30, stop=stop))[0].outputs[0]
    assert stopped.text == free.text[: free.text.index(stop)]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert llm.engine.scheduler.pool.used == 0
    answer = llm.chat([{"role": "user", "content": "What does os.path.join do?"}], GREEDY)
    assert answer[0].text


def test_a_bad_request_runs_nothing(llm):
    with pytest.raises(PromptTooLong):
        llm.generate(["fine", [1] * 600], GREEDY)
    assert not llm.engine.has_work


def test_options_are_named():
    with pytest.raises(ConfigError, match="pipeline_stages: no such option; allowed are device, dtype"):
        LLM("demo", pipeline_stages=1)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("kv_cache_memory", "5G", "int | None"),
        ("max_num_seqs", 4.0, "int"),
        ("max_num_seqs", True, "int"),
        ("gpu_memory_utilization", "0.9", "float"),
        ("prefix_cache", 1, "bool"),
        ("dtype", b"float32", "str | None"),
    ],
)
def test_options_of_another_kind_are_refused(name, value, allowed):
    with pytest.raises(ConfigError) as refused:
        LLM("demo", **{name: value})
    assert str(refused.value) == f"{name}: {value!r}, allowed is {allowed}"


def test_numbers_and_devices_of_others_are_taken():
    options = _engine_options(
        "demo", {"max_num_seqs": np.int64(4), "step_time_limit_ms": np.float32(2), "device": torch.device("cpu")}
    )
    assert (options.max_num_seqs, options.step_time_limit_ms, options.device) == (4, 2.0, "cpu")
    assert type(options.max_num_seqs) is int


def test_a_whole_number_is_a_real_one():
    with pytest.raises(ConfigError, match="gpu-memory-utilization: 2"):
        LLM("demo", gpu_memory_utilization=2)


def test_what_may_be_sampled(llm):
    free = llm.generate("import os", GREEDY)[0]
    word = free.text.split()[0]
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, bad_words=[word]),
        SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=free.outputs[0].token_ids[1:3]),
        SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8, stop=[free.text[1:4]]),
        SamplingParams(temperature=0.0, max_tokens=8, min_tokens=3, stop_token_ids=free.outputs[0].token_ids[:1]),
    ]
    without, allowed, unstopped, later = llm.generate(["import os"] * 4, params)
    first = tuple(free.outputs[0].token_ids[:1])
    assert tuple(without.outputs[0].token_ids[:1]) != first or word not in without.text
    assert set(allowed.outputs[0].token_ids) <= set(free.outputs[0].token_ids[1:3])
    assert unstopped.text == free.text
    assert first[0] not in later.outputs[0].token_ids[:3]
    with pytest.raises(InvalidRequest, match="allowed_token_ids: token id 999999999"):
        llm.generate("a", SamplingParams(allowed_token_ids=[999999999]))


def test_logprobs_of_the_prompt(llm):
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, n=2)
    for prompt in ("import os", "import os " * 60):
        result = llm.generate(prompt, params)[0]
        assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
        assert result.prompt_logprobs[0] is None
        assert all(report.chosen <= report.top[0][1] for report in result.prompt_logprobs[1:])
    # what is scored in a prompt is what generating it reports
    free = llm.generate("import os", SamplingParams(temperature=0.0, max_tokens=6, logprobs=1))[0]
    longer = free.prompt_token_ids + free.outputs[0].token_ids
    scored = llm.generate([longer], params)[0].prompt_logprobs[len(free.prompt_token_ids) :]
    chosen = [report.chosen for report in free.outputs[0].logprobs]
    assert [report.chosen for report in scored] == pytest.approx(chosen, abs=1e-4)
    assert llm.generate("import os", GREEDY)[0].prompt_logprobs is None


def test_the_end_of_a_long_prompt_is_kept(llm):
    ids = list(range(5, 605))
    for count, kept in ((-1, 512 - 8), (3, 3)):
        params = SamplingParams(temperature=0.0, max_tokens=8, truncate_prompt_tokens=count)
        assert llm.generate([ids], params)[0].prompt_token_ids == ids[-kept:]


def test_prefixes_are_shared_within_a_salt(llm):
    prompt = llm.tokenizer.encode("salted " * 150)[:200]

    def cached(**more):
        return llm.generate([{"prompt_token_ids": prompt, **more}], GREEDY)[0].cached_tokens

    assert [cached(cache_salt="a"), cached(), cached(cache_salt="b"), cached(cache_salt="a")] == [0, 0, 0, 196]
    for salt in ("", 3):
        with pytest.raises(InvalidRequest, match=r"^cache_salt: "):
            cached(cache_salt=salt)


def test_beam_search(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=12, logprobs=0)
    together = llm.beam_search(["import os", "class Thread"], params)
    for prompt, output in zip(["import os", "class Thread"], together, strict=True):
        found = output.sequences
        assert len(found) == len({tuple(one.tokens) for one in found}) == 3
        length = len(llm.tokenizer.encode(prompt))
        for one in found:
            assert one.text.startswith(prompt)
            assert one.finish_reason in ("stop", "length")
            assert len(one.logprobs) == len(one.tokens) - length
            assert sum(report.chosen for report in one.logprobs) == pytest.approx(one.cum_logprob, abs=1e-3)
        scores = [one.cum_logprob / (len(one.tokens) - (one.finish_reason == "stop")) for one in found]
        assert scores == sorted(scores, reverse=True)
        (alone,) = llm.beam_search(prompt, params)
        assert [one.tokens for one in alone.sequences] == [one.tokens for one in found]
    greedy = llm.generate("import os", GREEDY)[0].outputs[0]
    (single,) = llm.beam_search("import os", BeamSearchParams(beam_width=1, max_tokens=8, ignore_eos=True))[0].sequences
    assert single.tokens == llm.tokenizer.encode("import os") + greedy.token_ids
    assert llm.engine.scheduler.pool.used == 0


@pytest.mark.parametrize(
    ("params", "field"),
    [({"beam_width": 17}, "n"), ({"beam_width": 0}, "n"), ({"beam_width": 2, "length_penalty": 99}, "length_penalty")],
)
def test_a_beam_search_that_cannot_be_is_refused(llm, params, field):
    with pytest.raises(InvalidRequest) as caught:
        llm.beam_search("import os", BeamSearchParams(max_tokens=5, **params))
    assert caught.value.field == field
    assert not llm.engine.has_work


def test_it_sleeps_and_says_the_same_when_it_is_woken_up(llm):
    prompt = "import os, sys, json\n" * 12
    (before,) = llm.generate(prompt, GREEDY)
    for level in (1, 2):
        llm.sleep(level)
        with pytest.raises(Unavailable, match="sleeps"):
            llm.generate(prompt, GREEDY)
        llm.wake_up("kv_cache" if level == 1 else ["kv_cache"])
        with pytest.raises(Unavailable, match="sleeps"):
            llm.embed(prompt)
        llm.wake_up()
        (after,) = llm.generate(prompt, GREEDY)
        assert (after.text, after.cached_tokens) == (before.text, 0)
        assert llm.generate(prompt, GREEDY)[0].cached_tokens
    for call, field in ((lambda: llm.sleep(3), "level"), (lambda: llm.wake_up("lights"), "tags")):
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert refused.value.field == field
    steps = llm._steps

    def interrupted(owner):
        yield next(steps(owner))
        raise KeyboardInterrupt

    llm._steps = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt] * 3, GREEDY)
    finally:
        del llm._steps
    llm.sleep()
    llm.wake_up()
    assert llm.generate(prompt, GREEDY)[0].text == before.text
