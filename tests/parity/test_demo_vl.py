"""The demo model that sees tells what is true, of pictures that it was not trained on."""

import re

import pytest

from penstock import LLM
from penstock.core.errors import InvalidRequest, UnsupportedField
from penstock.core.sampling import SamplingParams
from penstock.service.checkpoint import BUNDLED

Image = pytest.importorskip("PIL.Image")
ImageDraw = pytest.importorskip("PIL.ImageDraw")
FOLDER = BUNDLED["demo-vl"]


@pytest.fixture(scope="module")
def llm():
    return LLM("demo-vl", max_num_seqs=8)


def square(colour: str):
    image = Image.new("RGB", (300, 300), "white")
    ImageDraw.Draw(image).rectangle((80, 90, 220, 230), fill=colour)
    return image


def asked(llm, text, *images):
    parts = [{"type": "image_pil", "image_pil": image} for image in images]
    return llm.chat([{"role": "user", "content": [*parts, {"type": "text", "text": text}]}])[0].text


def test_what_it_says_is_true(llm):
    for colour in ("red", "blue", "green"):
        assert asked(llm, "What is in the picture?", square(colour)) == f"A {colour} square."
    assert asked(llm, "What is in the picture?") == "I see no picture."


def test_prompts_with_media(llm):
    """As vLLM's offline API has them: with the model's own placeholders in the text."""
    text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What colour is the square?<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    given = [{"prompt": text, "multi_modal_data": {"image": square(colour)}} for colour in ("red", "blue")]
    assert [output.text for output in llm.generate(given, SamplingParams(temperature=0.0))] == ["Red.", "Blue."]
    (output,) = llm.generate(given[0], SamplingParams(temperature=0.0))
    assert output.prompt == text
    for wrong in ({"sound": b""}, {"image": 7}, {"image": [square("red")] * 2}, {"image": b"no image"}):
        with pytest.raises(InvalidRequest):
            llm.generate({"prompt": text, "multi_modal_data": wrong})
    with pytest.raises(UnsupportedField, match="no videos"):
        llm.generate({"prompt": text, "multi_modal_data": {"video": b"x"}})
    with pytest.raises(UnsupportedField, match="not embedded"):
        llm.embed(given[0])
    with pytest.raises(InvalidRequest, match="only without images"):
        llm.generate(given[0], SamplingParams(truncate_prompt_tokens=3))


def test_others_see_nothing():
    llm = LLM("demo", max_model_len=256, max_num_seqs=2)
    with pytest.raises(UnsupportedField, match="no images"):
        asked(llm, "?", square("red"))


@pytest.mark.slow
def test_its_card_says_how_often():
    from tools.train_demo_vl import evaluate

    card = (FOLDER / "README.md").read_text()
    shares = evaluate(FOLDER, int(re.search(r"Of (\d+) pictures", card).group(1)))
    for kind, share in shares.items():
        recorded = float(re.search(rf"\| {kind} \| ([\d.]+) % \|", card).group(1))
        assert 100 * share == pytest.approx(recorded, abs=0.5), kind
