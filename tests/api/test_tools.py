"""Tool calls and reasoning in answers: what a client sees of them, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.message import MessageReader
from penstock.core.thinking import Thinking
from penstock.text.dialect import Dialect
from penstock.text.reasoning import REASONING, ReasoningParser
from penstock.text.tools import PARSERS
from tests.api.test_chat import HI, URL, events
from tests.text.test_tools import CASES, OSLO, TOOLS, cut, obj

pytestmark = pytest.mark.anyio
DECLARED = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in TOOLS.items()]
NAMED = {"type": "function", "function": {"name": "stop"}}
QWEN = Dialect(PARSERS["hermes"], True, REASONING["qwen3"], reasoning_start=(1, 2), reasoning_end=(3,))
CALLING = f"<think>\nHm.\n</think>\n\nWell.\n<tool_call>\n{obj('get_weather', OSLO)}\n</tool_call>"


def says(*pieces: str, finish: str = "stop") -> Any:
    def script(generation: Any) -> None:
        for index in range(generation.params.n):
            for piece in pieces[:-1]:
                generation.say(piece, index)
            generation.say(pieces[-1], index, finish)

    return script


def folded(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a stream's deltas make, as clients put it together."""
    message: dict[str, Any] = {"calls": []}
    for chunk in chunks:
        for choice in chunk["choices"] if chunk != "[DONE]" else ():
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            for field in ("content", "reasoning_content", "reasoning"):
                if delta.get(field):
                    message[field] = message.get(field, "") + delta[field]
            for part in delta.get("tool_calls", ()):
                assert ("id" in part) == (part["index"] == len(message["calls"]))
                if "id" in part:
                    assert part["type"] == "function"
                    message["calls"].append([part["function"]["name"], ""])
                message["calls"][part["index"]][1] += part["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message.get("finish_reason")
    return message


def unfolded(choice: dict[str, Any]) -> dict[str, Any]:
    """The same of a whole answer's choice."""
    message = choice["message"]
    found = {key: message[key] for key in ("content", "reasoning_content", "reasoning") if message.get(key)}
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    return {"calls": calls, "finish_reason": choice["finish_reason"], **found}


async def test_calls_of_the_models_own(client: httpx.AsyncClient, frontend: Any) -> None:
    frontend.dialect = QWEN
    frontend.script = says(CALLING)
    body = {"messages": HI, "tools": DECLARED}
    answer = (await client.post(URL, json=body)).json()["choices"][0]
    assert answer["finish_reason"] == "tool_calls"
    message = answer["message"]
    (call,) = message.pop("tool_calls")
    assert message == {
        "role": "assistant", "content": "Well.", "refusal": None, "reasoning": "Hm.", "reasoning_content": "Hm."
    }  # fmt: skip
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", OSLO)
    assert frontend.submitted[0].params.structured_outputs is None
    assert b"tools:['get_weather', 'stop']" in bytes(frontend.submitted[0].prompt)


@pytest.mark.parametrize("choice", ["auto", "required", NAMED, "none"])
@pytest.mark.parametrize("several", [True, False])
async def test_streams_say_what_whole_answers_say(
    client: httpx.AsyncClient, frontend: Any, choice: Any, several: bool
) -> None:
    frontend.dialect = QWEN
    forced = f"<think>so</think>[{obj('stop', {}, 'parameters')}, {obj('get_weather', OSLO, 'parameters')}]"
    text = {"auto": CALLING + CALLING[CALLING.index("<tool") :], "required": forced}.get(str(choice), '{"a": [1, 2]}')
    frontend.script = says(*text)
    body = {"messages": HI, "tools": DECLARED, "tool_choice": choice, "parallel_tool_calls": several, "n": 2}
    whole = (await client.post(URL, json=body)).json()["choices"]
    chunks = events(await client.post(URL, json=body | {"stream": True}))
    for index in range(2):
        assert folded(chunks, index) == unfolded(whole[index])
    calls = unfolded(whole[0])["calls"]
    assert len(calls) == {"auto": 2, "required": 2, "none": 0}.get(str(choice), 1) - (
        choice in ("auto", "required") and not several
    )
    assert whole[0]["finish_reason"] == ("tool_calls" if choice in ("auto", "required") else "stop")


async def test_what_is_cut_off_says_so(client: httpx.AsyncClient, frontend: Any) -> None:
    frontend.dialect = QWEN
    frontend.script = says(CALLING[:-30], finish="length")
    answer = (await client.post(URL, json={"messages": HI, "tools": DECLARED})).json()["choices"][0]
    assert answer["finish_reason"] == "length"
    assert answer["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_forced_calls_have_a_form(client: httpx.AsyncClient, frontend: Any) -> None:
    body = {"messages": HI, "tools": DECLARED, "tool_choice": "required", "parallel_tool_calls": False}
    frontend.script = says("[]")
    assert (await client.post(URL, json=body)).status_code == 200
    schema = json.loads(frontend.submitted[-1].params.structured_outputs.json)
    good = [{"name": "get_weather", "parameters": {"city": "x"}}]
    jsonschema.validate(good, schema)
    for bad in ([], good * 2, [{"name": "x", "parameters": {}}], [{"name": "stop", "parameters": {"x": 1}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)
    assert (await client.post(URL, json=body | {"tool_choice": NAMED})).status_code == 200
    schema = json.loads(frontend.submitted[-1].params.structured_outputs.json)
    assert schema == {"type": "object", "properties": {}, "additionalProperties": False}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    assert (await client.post(URL, json=body | {"tool_choice": some})).status_code == 200
    schema = json.loads(frontend.submitted[-1].params.structured_outputs.json)
    assert [each["properties"]["name"]["const"] for each in schema["items"]["anyOf"]] == ["stop"]
    assert b"tools:['get_weather', 'stop']" in bytes(frontend.submitted[-1].prompt)


WRONG = [
    ({"tools": [{"type": "custom"}]}, "tools[0].type: 'custom', allowed is 'function'"),
    ({"tools": [{"type": "function"}]}, "tools[0].function: missing, it is required"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name: ''"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters: 1"),
    ({"tools": DECLARED, "tool_choice": "any"}, "tool_choice: 'any', allowed are none, auto, required"),
    ({"tools": DECLARED, "tool_choice": {"type": "function", "function": {"name": "g"}}},
     "tool_choice.function.name: 'g', allowed is the name of one of tools: get_weather, stop"),
    ({"tools": DECLARED, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x"}}},
     "tool_choice.allowed_tools.mode: 'x'"),
    ({"tool_choice": "required"}, "tool_choice: 'required', allowed only with tools"),
    ({"tools": DECLARED, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs: given"),
    ({"tools": [*DECLARED, {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {
        "type": "strin"}}}}}], "tool_choice": "required"}, "tools[2].function.parameters.properties.x: type: 'strin'"),
    ({"reasoning_effort": "most"}, "reasoning_effort: 'most', allowed is 'none'"),
    ({"thinking_token_budget": 5}, "thinking_token_budget: 5, allowed only where --reasoning-parser"),
    ({"thinking_token_budget": -2}, "thinking_token_budget: -2, allowed is at least -1"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "says"), WRONG)
async def test_what_is_wrong_is_named(client: httpx.AsyncClient, fields: dict, says: str) -> None:
    response = await client.post(URL, json={"messages": HI, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(says)
    assert says.startswith(response.json()["error"]["param"])


async def test_nobody_reads_calls_of_a_model_that_is_unknown(client: httpx.AsyncClient, frontend: Any) -> None:
    body = {"messages": HI, "tools": DECLARED}
    for dialect in (Dialect(), Dialect(PARSERS["hermes"], free_calls=False)):
        frontend.dialect = dialect
        response = await client.post(URL, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tool_choice")
        assert "--tool-call-parser" in response.json()["error"]["message"]
        for choice in ("none", NAMED):
            assert (await client.post(URL, json=body | {"tool_choice": choice})).status_code == 200


async def test_calls_and_results_in_the_conversation(client: httpx.AsyncClient, frontend: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    talk = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "call_1", "content": "done"})
    assert (await client.post(URL, json={"messages": talk})).status_code == 200
    assert b"tool:done" in bytes(frontend.submitted[-1].prompt)


# --- reasoning


@pytest.mark.parametrize("stream", [True, False])
async def test_reasoning_that_is_not_wanted(client: httpx.AsyncClient, frontend: Any, stream: bool) -> None:
    frontend.dialect = QWEN
    frontend.script = says(*"<think>Hm.</think>\nYes.")
    response = await client.post(URL, json={"messages": HI, "include_reasoning": False, "stream": stream})
    found = folded(events(response)) if stream else unfolded(response.json()["choices"][0])
    assert found == {"calls": [], "content": "Yes.", "finish_reason": "stop"}
    usage = {"stream_options": {"include_usage": True}} if stream else {}
    counted = await client.post(URL, json={"messages": HI, "include_reasoning": False, "stream": stream} | usage)
    used = (events(counted)[-2] if stream else counted.json())["usage"]
    assert used["completion_tokens_details"] == {"reasoning_tokens": len("Hm.")}  # one for each byte


@pytest.mark.parametrize("shown", [True, False])
async def test_usage_counts_what_it_thought(client: httpx.AsyncClient, frontend: Any, shown: bool) -> None:
    """A byte is a token here."""
    body = {"messages": HI, "n": 2, "include_reasoning": shown}
    assert "completion_tokens_details" not in (await client.post(URL, json=body)).json()["usage"]
    frontend.dialect = QWEN
    frontend.script = says(*"<think>Hm.</think>\nYes.")
    usage = (await client.post(URL, json=body)).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len("Hm.")}
    streamed = events(await client.post(URL, json=body | {"stream": True, "stream_options": {"include_usage": True}}))
    assert streamed[-2]["usage"] == usage


async def test_an_answer_that_is_all_reasoning(client: httpx.AsyncClient, frontend: Any) -> None:
    frontend.dialect = QWEN
    frontend.script = says("<think>Hm, I am", finish="length")
    message = (await client.post(URL, json={"messages": HI})).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == (None, "Hm, I am")


async def test_how_much_it_is_to_think(client: httpx.AsyncClient, frontend: Any) -> None:
    frontend.dialect = QWEN
    frontend.script = says("Yes.")
    body: dict[str, Any] = {"messages": HI, "reasoning_effort": "none", "chat_template_kwargs": {"thinking": 1}}
    assert (await client.post(URL, json=body)).status_code == 200
    shown = b"{'reasoning_effort': 'none', 'enable_thinking': False, 'thinking': 1}"
    assert shown in bytes(frontend.submitted[-1].prompt)
    assert (await client.post(URL, json={"messages": HI, "thinking_token_budget": 7})).status_code == 200
    assert frontend.submitted[-1].params.thinking == Thinking(start=(1, 2), end=(3,), budget=7)
    assert (await client.post(URL, json={"messages": HI, "thinking_token_budget": -1})).status_code == 200
    assert frontend.submitted[-1].params.thinking is None


async def test_forms_begin_after_the_reasoning(client: httpx.AsyncClient, frontend: Any) -> None:
    """Which the prompt may have begun already, or ended."""
    frontend.dialect = QWEN
    frontend.script = says("1")
    for end, thinking in (
        ("", Thinking(start=(1, 2), end=(3,))),
        ("<think>\n", Thinking(end=(3,))),
        ("<think>\n\n</think>\n\n", None),
    ):
        talk = [*HI, {"role": "assistant", "content": end}]
        form = {"structured_outputs": {"regex": "[0-9]"}, "continue_final_message": True}
        assert (await client.post(URL, json={"messages": talk, **form})).status_code == 200
        assert frontend.submitted[-1].params.thinking == thinking


@given(data=st.data())
def test_messages_do_not_depend_on_how_their_text_comes(data: st.DataObject) -> None:
    """Reasoning, content and calls of every parser, whole and in deltas."""
    name, text, content, calls = data.draw(st.sampled_from(CASES))
    family = REASONING[data.draw(st.sampled_from(sorted(REASONING)))]
    opened = data.draw(st.sampled_from([True, None]))
    said = f"{'' if opened else family.start}\nHm < {family.end[:-1]}\n{family.end}\n"

    def reader() -> MessageReader:
        reasoning, tools = ReasoningParser(family, opened), PARSERS[name](TOOLS)
        return MessageReader(reasoning, tools, several=True, shows_reasoning=True)

    pieces = cut(said + text, data.draw(st.lists(st.integers(0, len(said + text)))))
    one = reader()
    deltas = [*map(one.push, pieces[:-1]), one.push(pieces[-1], last=True)]
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    whole = reader().whole(said + text)
    assert folded(chunks) == unfolded({"message": whole, "finish_reason": None})
    assert whole["reasoning"] == f"Hm < {family.end[:-1]}"
    assert (whole["content"] or "").strip() == content.strip()
    assert len(whole.get("tool_calls", ())) == len(calls)
