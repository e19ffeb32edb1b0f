"""The offline API."""

import numpy as np
import pytest

from penstock import LLM, SamplingParams
from penstock.core.errors import ConfigError, InvalidRequest, PromptTooLong

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
    with pytest.raises(ConfigError, match="tensor_parallel_size: no such option; allowed are device, dtype"):
        LLM("demo", tensor_parallel_size=1)
