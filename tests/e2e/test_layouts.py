"""Instances that spread the same model over ranks in unlike ways hand requests over to each other."""

import json

import httpx
import pytest

from penstock import LLM, SamplingParams
from penstock.nn import native
from tests.helpers.deployments import DEMO, deployed
from tests.helpers.waiting import eventually
from tools.make_checkpoint import write

pytestmark = pytest.mark.skipif(native.missing() is not None, reason="ranks of one machine meet in native code")
SHARDS, STAGES = "tensor-parallel-size", "pipeline-parallel-size"
ALONE, TWO, STAGED, BOTH = {}, {SHARDS: 2}, {STAGES: 2}, {SHARDS: 2, STAGES: 2}
PROMPTS = [[(7 * i + 11 * k) % 900 + 1 for k in range(150 + 70 * i)] for i in range(3)]


def between(kind, prefill, decode):
    """(answers, how many were handed over) of requests that are handed over after their prompts."""
    instances = [{"role": "prefill", **prefill}, {"role": "decode", **decode}]
    content = {"model": "demo", "engine": DEMO, "instances": instances, "transport": {"kind": kind}}
    with deployed(content | {"policy": "least_loaded"}) as up:
        answers = []
        for prompt in PROMPTS:
            body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(up.url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=60)
            assert answer.status_code == 200, answer.text
            answers.append(answer.json()["choices"][0]["token_ids"])
        eventually(lambda: up.metric("handoffs_total") == len(PROMPTS), 20, up.log)
        assert up.stop() == 0
        assert not any("Traceback" in line for line in up.lines), up.log()
    return answers


def whole(alone):
    """The same of an engine that does all by itself, on one rank."""
    found = []
    for prompt in PROMPTS:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(alone.url + "/v1/completions", json=body | {"return_token_ids": True}, timeout=60).json()
        found.append(answer["choices"][0]["token_ids"])
    return found


@pytest.mark.slow
def test_a_hand_off_from_shards_to_stages_is_of_the_same_tokens(alone):
    """Over TCP, which takes bytes along: a block is whole, whichever rank has computed what of it."""
    assert between("tcp", TWO, STAGED) == whole(alone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "shared"])
@pytest.mark.parametrize("prefill", [ALONE, TWO, STAGED, BOTH], ids=["1TP", "2TP", "1TP2PP", "2TP2PP"])
@pytest.mark.parametrize("decode", [ALONE, TWO, STAGED, BOTH], ids=["1TP", "2TP", "1TP2PP", "2TP2PP"])
def test_hand_offs_between_all_layouts_are_of_the_same_tokens(alone, kind, prefill, decode):
    assert between(kind, prefill, decode) == whole(alone)


@pytest.mark.slow
def test_8_bit_latents_drafts_of_a_head_and_structured_outputs_are_handed_over(tmp_path):
    """Of a model with experts and latent attention, in bfloat16; against one engine without drafts."""
    pytest.importorskip("transformers")
    folder = tmp_path / "model"
    write("deepseek-tiny", folder)
    options = {"max-model-len": 1024, "kv-cache-memory": "32M", "kv-cache-dtype": "int8"}
    drafts = json.dumps({"method": "mtp", "num_speculative_tokens": 2, "adaptive": False})
    engine = {**options, "speculative-config": drafts}
    instances = [{"role": "prefill"}, {"role": "decode"}]
    content = {"model": str(folder), "engine": engine, "instances": instances, "transport": {"kind": "tcp"}}
    shapes = [
        {},
        {"structured_outputs": {"regex": "[a-z ]{20,60}"}},
        {"structured_outputs": {"json": {"type": "object"}}},
    ]
    body = {"model": str(folder), "max_tokens": 40, "temperature": 0, "return_token_ids": True}
    with deployed(content | {"policy": "least_loaded"}) as up:
        found = []
        for prompt, shape in zip(PROMPTS, shapes, strict=True):
            answer = httpx.post(up.url + "/v1/completions", json=body | {"prompt": prompt} | shape, timeout=60)
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["choices"][0]["token_ids"])
        eventually(lambda: up.metric("handoffs_total") == len(PROMPTS), 20, up.log)
        assert up.metric("spec_decode_num_draft_tokens_total") > 0
        assert up.stop() == 0
    llm = LLM(str(folder), max_model_len=1024, kv_cache_memory=1 << 25, kv_cache_dtype="int8", speculative_config="off")
    params = [SamplingParams(max_tokens=40, temperature=0, **shape) for shape in shapes]
    plain = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    assert found == [list(output.outputs[0].token_ids) for output in plain]
