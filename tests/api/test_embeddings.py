"""/v1/embeddings, and what is made of embeddings: /v1/rerank and /v1/score."""

import base64
import math
import struct

import pytest

from penstock.api.embeddings import MAX_INPUTS
from penstock.api.schema import MAX_PROMPTS
from penstock.core.errors import EngineFailure
from penstock.service.embedding import EmbeddingDefaults

pytestmark = pytest.mark.anyio
ABCD = [97, 98, 99, 100, 97]  # "abcda": by the script 2 of kind 1, and 1 of each other
LENGTH = math.sqrt(2 * 2 + 1 + 1 + 1)


async def embed(client, **body):
    return await client.post("/v1/embeddings", json=body)


async def vectors(client, **body):
    answer = await embed(client, **body)
    assert answer.status_code == 200, answer.text
    return [row["embedding"] for row in answer.json()["data"]]


async def test_the_answer_is_openais(client, frontend):
    answer = await embed(client, model="tiny", input="abcda", user="u", priority=3)
    assert answer.json() | {"id": "", "created": 0} == {
        "id": "",
        "object": "list",
        "created": 0,
        "model": "tiny",
        "data": [{"object": "embedding", "index": 0, "embedding": [x / LENGTH for x in (1, 2, 1, 1)]}],
        "usage": {"prompt_tokens": 5, "total_tokens": 5, "prompt_tokens_details": {"cached_tokens": 2}},
    }
    (asked,) = frontend.submitted
    assert asked.pooling == "last"
    assert asked.level.priority == 3


async def test_every_kind_of_input_is_taken_in_order(client, frontend):
    alone = await vectors(client, input=ABCD)
    assert await vectors(client, input=["abcda", "b", "abcda"]) == [*alone, [0, 0, 1, 0], *alone]
    assert await vectors(client, input=[[98], ABCD]) == [[0, 0, 1, 0], *alone]
    assert [part.prompt for part in frontend.submitted[-2:]] == [[98], ABCD]
    frontend.submitted.clear()
    await vectors(client, input=["special", "special"], add_special_tokens=False)
    await vectors(client, input="special")
    assert [part.prompt[-1] == 256 for part in frontend.submitted] == [False, False, True]


async def test_a_conversation_is_embedded_as_its_text(client, frontend):
    hi = {"role": "user", "content": "abcda"}
    ways = {"user:abcda\n": {}, "user:abcda\nassistant:": {"add_generation_prompt": True}}
    ways["user:abcda"] = {"continue_final_message": True}
    for text, fields in ways.items():
        assert await vectors(client, messages=[hi], **fields) == await vectors(client, input=text)
        assert frontend.submitted[-2].prompt == frontend.submitted[-1].prompt
    body = {"messages": [hi], "encoding_format": "float"}
    assert (await client.post("/invocations", json=body)).json()["data"] == (await embed(client, **body)).json()["data"]
    refused = await embed(client, messages=[{"role": "user", "content": "x" * 200}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages")


async def test_vllms_name_for_normalize(client):
    (plain,) = await vectors(client, input="abcda", use_activation=False)
    assert plain == [1, 2, 1, 1]
    (normal,) = await vectors(client, input="abcda", use_activation=True, normalize=True)
    assert normal == [x / LENGTH for x in plain]


async def test_prompts_are_padded_where_that_is_asked_for(client, frontend):
    longest = frontend.max_model_len
    for fields, length in (
        ({}, longest),
        ({"truncate_prompt_tokens": 9}, 9),
        ({"truncate_prompt_tokens": -1}, longest),
    ):
        await vectors(client, input=["abcda", "b"], padding="max_length", **fields)
        prompts = [part.prompt for part in frontend.submitted[-2:]]
        assert prompts == [[*text, *[0] * (length - len(text))] for text in (ABCD, [98])]
    frontend.tokenizer.pad_id = None
    await vectors(client, input="b", padding="do_not_pad")
    assert frontend.submitted[-1].prompt == [98]
    refused = await embed(client, input="b", padding="max_length")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "padding")


async def test_base64_is_the_same_in_float32(client):
    plain = await vectors(client, input="abcda", encoding_format="float")
    (packed,) = await vectors(client, input="abcda", encoding_format="base64")
    assert struct.unpack("<4f", base64.b64decode(packed)) == pytest.approx(plain[0], abs=1e-7)


async def test_dimensions_are_cut_and_normalised_again(client, frontend):
    assert await vectors(client, input="abcda", dimensions=2) == [[1 / math.sqrt(5), 2 / math.sqrt(5)]]
    assert await vectors(client, input="abcda", dimensions=2, normalize=False) == [[1, 2]]
    frontend.embedding = EmbeddingDefaults("mean", normalize=False)
    assert await vectors(client, input="abcda") == [[1, 2, 1, 1]]
    assert await vectors(client, input="abcda", normalize=True) == [[x / LENGTH for x in (1, 2, 1, 1)]]
    assert {part.pooling for part in frontend.submitted} == {"last", "mean"}


async def test_prompts_are_cut_where_that_is_asked_for_and_refused_where_not(client, frontend):
    longest = "a" * frontend.max_model_len
    assert len(await vectors(client, input=[longest])) == 1  # no room is needed beside it
    for given in ("a" * 200, [97] * 200):
        assert len(await vectors(client, input=given, truncate_prompt_tokens=-1)) == 1
        assert len(frontend.submitted[-1].prompt) == frontend.max_model_len
    await vectors(client, input="abcda", truncate_prompt_tokens=2)
    await vectors(client, input="abcda", truncate_prompt_tokens=2, truncation_side="right")
    assert [part.prompt for part in frontend.submitted[-2:]] == [[100, 97], [97, 98]]
    frontend.submitted.clear()
    for given in (["a", longest + "a"], [[97] * 129]):
        error = (await embed(client, input=given)).json()["error"]
        assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
        assert error["message"].startswith("input: This model's maximum context length is 128 tokens")
    assert not frontend.submitted, "all or nothing"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1, 257]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 5}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"input": "a", "normalize": True, "use_activation": False}, "use_activation"),
        ({"input": "a", "padding": "longest"}, "padding"),
        ({"input": "a", "truncate_prompt_tokens": 129}, "truncate_prompt_tokens"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side"),
        ({"input": "a", "model": "other"}, "model"),
        ({"input": "a", "cache_salt": ""}, "cache_salt"),
    ],
)
async def test_mistakes_name_the_field(client, frontend, body, field):
    answer = await embed(client, **body)
    assert answer.status_code == (404 if field == "model" else 400)
    assert answer.json()["error"]["param"] == field
    assert not frontend.submitted


async def test_what_an_engine_could_not_do_is_an_error(client, frontend):
    frontend.embed = lambda generation: generation.fail(EngineFailure("it is gone"))
    answer = await embed(client, input="a")
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_by_their_nearness_to_the_query(client, path):
    body = {"query": "aa", "documents": ["b", "aaaa", "ab", "aaaa"], "top_n": 3}
    answer = (await client.post(path, json=body)).json()
    found = [(row["index"], round(row["relevance_score"], 6), row["document"]["text"]) for row in answer["results"]]
    assert found == [(1, 1.0, "aaaa"), (3, 1.0, "aaaa"), (2, round(1 / math.sqrt(2), 6), "ab")]
    assert answer["usage"]["total_tokens"] == 2 + 1 + 4 + 2 + 4
    answer = (await client.post(path, json=body | {"return_documents": False})).json()
    assert all("document" not in row for row in answer["results"])


async def test_texts_are_scored_in_pairs(client):
    answer = await client.post("/v1/score", json={"text_1": "a", "text_2": ["a", "b", "ab"]})
    assert [round(row["score"], 6) for row in answer.json()["data"]] == [1, 0, round(1 / math.sqrt(2), 6)]
    answer = await client.post("/score", json={"text_1": ["a", "b"], "text_2": ["ab", "b"]})
    assert [round(row["score"], 6) for row in answer.json()["data"]] == [round(1 / math.sqrt(2), 6), 1]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"] * (MAX_PROMPTS + 1)}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": ["a" * 200]}, "documents"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": [""]}, "text_2"),
    ],
)
async def test_mistakes_of_theirs_name_the_field_too(client, path, body, field):
    answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
