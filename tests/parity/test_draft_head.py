"""What a model's draft head proposes, against transformers' parts put together as the paper has it."""

import pytest
import torch

from penstock.core.errors import ConfigError
from penstock.core.plan import BLOCK_TOKENS
from penstock.nn.loader import load_model
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engines import Collector, make_engine, make_request
from tests.helpers.proposers import heads
from tools.mtp import FurtherTokens, measure, train

pytest.importorskip("transformers")

DEVICE, COUNT = torch.device("cuda" if torch.cuda.is_available() else "cpu"), 3
PROMPT = [(7 * i) % 300 + 1 for i in range(2 * BLOCK_TOKENS - 2)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), "deepseek-v3", further=True)


@pytest.fixture(scope="module")
def reference(folder):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    further, stored = FurtherTokens(model), load_file(folder / "model.safetensors")
    for name, value in further.state_dict().items():
        short = name.removeprefix("block.")
        if short.startswith("mlp.experts."):
            stem = f"model.layers.{further.number}.mlp.experts."
            kinds = ("gate_proj", "up_proj") if "gate_up" in short else ("down_proj",)
            each = [torch.cat([stored[f"{stem}{i}.{kind}.weight"] for kind in kinds]) for i in range(len(value))]
            value.copy_(torch.stack(each))
        else:
            value.copy_(stored[f"model.layers.{further.number}.{short}"])
    return model, further


@torch.no_grad()
def proposed(model, further, tokens, count):
    """Drafts of what comes after these, the last of which was drawn."""
    hidden = model.model(torch.tensor([tokens[:-1]])).last_hidden_state
    following, found = tokens[1:], []
    while len(found) < count:
        made = further(hidden, torch.tensor([following]))
        found.append(int(model.lm_head(made[0, -1]).argmax()))
        hidden, following = torch.cat((hidden, made[:, -1:]), 1), [*following, found[-1]]
    return found


@pytest.mark.parametrize("mode", ["table", "contiguous"])
def test_drafts_are_the_references(folder, reference, monkeypatch, mode):
    """After a prompt in chunks, and of a sequence whose places ahead are in its next block."""
    model = load_model(folder, DEVICE, draft_head=True)
    engine = make_engine(model, budget=50, speculation=heads(COUNT), address_mode=mode)
    runner, results = engine.executor.worker, []
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda *args: results.append(run(*args)) or results[-1])
    out = Collector(engine).run(make_request("a", PROMPT, max_tokens=12))["a"]
    known, compared = [*PROMPT], set()
    for result in results:
        for tokens in result.tokens:
            known += tokens
            drafts = result.proposed.get("a", [])
            assert drafts == proposed(*reference, known, len(drafts))
            compared.add(len(drafts))
    assert known == PROMPT + out
    assert COUNT in compared


def test_a_prefix_that_another_token_follows_still_has_its_drafts(folder):
    """Its last place was made with the token that followed there first; all before it are right."""
    model = load_model(folder, DEVICE, draft_head=True)
    warm = Collector(make_engine(model, speculation=heads(COUNT)))
    warm.run(make_request("first", [*PROMPT[:BLOCK_TOKENS], 5, 6, 7]))
    warm.run(make_request("other", [*PROMPT[:BLOCK_TOKENS], 9, 8]))
    assert warm.cached["other"] == BLOCK_TOKENS
    cold = Collector(make_engine(load_model(folder, DEVICE)))
    cold.run(make_request("other", [*PROMPT[:BLOCK_TOKENS], 9, 8]))
    assert warm.tokens["other"] == cold.tokens["other"]
    assert warm.engine.scheduler.speculation.counters.drafts


def test_where_there_is_no_such_layer_it_is_said(tmp_path):
    bare = write_checkpoint(tmp_path / "bare", "deepseek-v3")
    llama = write_checkpoint(tmp_path / "llama", "llama")
    for checkpoint, why in ((bare, "are not in the checkpoint"), (llama, "Llama has none")):
        assert load_model(checkpoint, DEVICE).draft_head is None
        with pytest.raises(ConfigError, match=f"no layer that predicts further tokens: .*{why}") as refused:
            load_model(checkpoint, DEVICE, draft_head=True)
        assert refused.value.field == "speculative-config"


@pytest.mark.slow
def test_a_trained_head_is_often_right_and_changes_no_token(tmp_path):
    """Sampled too: what the model and its head would rather draw is drawn with the same noise."""
    train(tmp_path / "model", 200)
    for temperature in (0.0, 1.0):
        _, plain = measure(tmp_path / "model", 0, temperature)
        length, drafted = measure(tmp_path / "model", 2, temperature)
        assert drafted == plain
        assert length > 1.2
