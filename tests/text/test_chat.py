from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.core.errors import ConfigError, InvalidRequest, UnsupportedField
from penstock.text.chat import normalise
from penstock.text.tokenizer import Tokenizer

from .conftest import read_by_transformers, write_config

CHATML = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPS = CHATML.replace("m.content", "m.content | trim")
FULL = """
{%- if tools %}
    {{- tools | tojson }} {{ tools | tojson(indent=2) }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% continue %}{% endif %}
    {%- if m.role == 'assistant' %}
    {%- generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}
    {%- for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}
    {%- if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}
    {%- else %}
<{{ m.role }}>{{ m.content }}
    {%- endif %}
    {%- if loop.index == 6 %}{% break %}{% endif %}
{%- endfor %}
{%- set ns = namespace(n=dict(a=1)) %}{{ ns.n.a }} {{ documents is none }} {{ mood | default('calm') }} {{ nothing }}
"""
PARTS_ONLY = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}{% endfor %}"
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>."},
    {"role": "user", "content": "Grüße! ", "name": None},
    {"role": "assistant", "content": "Hello  "},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
def serve(checkpoint: Path):
    """Writes a tokenizer_config.json and loads the checkpoint."""

    def load(chat_template: object = None, given: str | None = None) -> Tokenizer:
        write_config(checkpoint, bos_token="<|begin|>", eos_token="<|end|>", chat_template=chat_template)
        return Tokenizer(checkpoint, given)

    return load


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("template", [CHATML, STRIPS, FULL], ids=["chatml", "strips", "full"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
def test_agrees_with_transformers(checkpoint: Path, serve, template: str, prompt: bool, tools: list | None) -> None:
    ours = serve(template)
    theirs = read_by_transformers(checkpoint)
    text = theirs.apply_chat_template(MESSAGES, tools=tools, add_generation_prompt=prompt, tokenize=False, mood="merry")
    options = {"add_generation_prompt": prompt, "tools": tools, "template_kwargs": {"mood": "merry"}}
    assert ours.render_chat(MESSAGES, **options) == text
    assert ours.encode_chat(MESSAGES, **options) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, STRIPS], ids=["chatml", "strips"])
@pytest.mark.parametrize("content", ["Hello", "Hello ", "Hello\n\n", ""])
def test_continuing_the_final_message(checkpoint: Path, serve, template: str, content: str) -> None:
    ours = serve(template)
    theirs = read_by_transformers(checkpoint)
    messages = [*MESSAGES[:2], {"role": "assistant", "content": content}]
    text = theirs.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    assert ours.render_chat(messages, add_generation_prompt=False, continue_final_message=True) == text
    assert messages[-1]["content"] == content


def test_what_cannot_be_continued(serve) -> None:
    tokenizer = serve(CHATML)
    with pytest.raises(InvalidRequest, match="add_generation_prompt") as caught:
        tokenizer.render_chat(MESSAGES, continue_final_message=True)
    assert caught.value.field == "continue_final_message"
    with pytest.raises(InvalidRequest, match="no content to continue"):
        tokenizer.render_chat([{"role": "user"}], add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequest, match="does not show"):
        serve("{{ messages[0].content }}").render_chat(
            MESSAGES, add_generation_prompt=False, continue_final_message=True
        )


def test_special_tokens_are_not_put_around_again(directories: dict[str, Path]) -> None:
    tokenizer = Tokenizer(directories["llama"], "{{ bos_token }}{{ messages[0].content }}")
    bos, *rest = tokenizer.encode_chat(user("the dog"))
    assert tokenizer.token_text(bos) == "<s>"
    assert bos not in rest


def test_which_template_is_used(checkpoint: Path, serve, tmp_path: Path) -> None:
    named = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "config with tools"}]
    assert serve(named).render_chat(user("")) == "config"
    assert serve(named).render_chat(user(""), tools=TOOLS) == "config with tools"
    assert serve(named).render_chat(user(""), tools=[]) == "config"
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert serve().render_chat(user("")) == "json"
    assert serve("config").render_chat(user("")) == "config"
    (checkpoint / "chat_template.jinja").write_text("jinja")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "tool_use.jinja").write_text("jinja with tools")
    assert serve("config").render_chat(user("")) == "jinja"
    assert serve("config").render_chat(user(""), tools=TOOLS) == "jinja with tools"
    assert serve("config", given="{{ 'given' }}").render_chat(user("")) == "given"
    (tmp_path / "mine.txt").write_text("from a file")
    assert serve("config", given=str(tmp_path / "mine.txt")).render_chat(user("")) == "from a file"


def test_wrong_templates(serve) -> None:
    with pytest.raises(ConfigError, match=r"no/such/file: cannot be read"):
        serve(given="no/such/file")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not a valid chat template: line 2"):
        serve("\n{% if %}")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template must be"):
        serve([{"name": "default"}])


def test_no_template(serve) -> None:
    tokenizer = serve()
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.encode_chat(MESSAGES)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "nothing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_failing_template_is_the_requests_fault(serve, template: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        serve(template).render_chat(user("hi"))
    assert caught.value.field == "messages"
    assert "\n" not in str(caught.value)


def test_invalid_unicode(serve) -> None:
    with pytest.raises(InvalidRequest, match=r"U\+DC00") as caught:
        serve(CHATML).encode_chat(user("\udc00"))
    assert caught.value.field == "messages"


def test_template_kwargs(serve) -> None:
    tokenizer = serve("{{ bos_token }} {{ thinking }}")
    assert tokenizer.render_chat(user(""), template_kwargs={"thinking": False, "bos_token": "B"}) == "B False"
    with pytest.raises(InvalidRequest, match="'messages'") as caught:
        tokenizer.render_chat(user(""), template_kwargs={"messages": []})
    assert caught.value.field == "chat_template_kwargs"


def test_the_date(serve) -> None:
    before = datetime.now().year
    year = int(serve("{{ strftime_now('%Y') }}").render_chat(user("")))
    assert before <= year <= datetime.now().year


def test_content_parts(serve) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert serve("{{ messages[0].content }}").render_chat(user(parts)) == "a\nb"
    only = serve(PARTS_ONLY)
    assert only.render_chat([*user("x"), *user(parts), {"role": "assistant"}]) == "<user>x<user>a\nb<assistant>"
    text = only.render_chat(user("x "), add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>x "


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one"),
        (["hi"], r"messages\[0\]: must be an object"),
        ([{"content": "hi"}], r"messages\[0\]: must be an object with a role"),
        (user(3), r"messages\[0\]\.content: must be a string or a list"),
        (user(["hi"]), r"messages\[0\]\.content\[0\]: must be an object with a type"),
        (user([{"type": "text"}]), r"content\[0\]\.text: must be a string"),
        ([{"role": "assistant", "tool_calls": {}}], r"messages\[0\]\.tool_calls: must be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"tool_calls\[0\]: must be an object with a function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r"tool_calls\[0\]\.function\.arguments: not JSON",
        ),
    ],
)
def test_malformed_messages(messages: list, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        normalise(messages)
    assert caught.value.field == "messages"


def test_other_parts_are_named() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(UnsupportedField, match=re.escape("messages[0].content[1]: parts of type 'image_url'")):
        normalise(user(parts))


def test_tool_calls_and_reasoning() -> None:
    function = {"name": "f", "arguments": '{"x": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    bare = {"id": "2", "type": "function", "function": {"name": "g", "arguments": ""}}
    message = {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call, bare]}
    (result,) = normalise([message])
    assert "content" not in result
    assert [entry["function"]["arguments"] for entry in result["tool_calls"]] == [{"x": 1}, {}]
    assert result["tool_calls"][0]["id"] == "1"
    assert (result["reasoning_content"], result["thinking"]) == ("hm", "hm")
    assert function["arguments"] == '{"x": 1}'
