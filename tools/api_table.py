"""The tables of docs/api.md: every request field of OpenAI's and vLLM's APIs, and whether penstock supports it.

`field_table` in `penstock.api.schema` says whether a field is supported; the notes on it are below.

usage: python tools/api_table.py [--write | --check]
"""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.api.chat import ChatBody
from penstock.api.completions import CompletionBody
from penstock.api.embeddings import MAX_INPUTS, EmbeddingBody
from penstock.api.schema import NOT_YET, REMOVED_PREFIXES, Body, field_table
from penstock.api.tools import MAX_TOOLS
from penstock.core.sampling import (
    MAX_BAD_WORDS,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRINGS,
)

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
BEGIN, END = "<!-- fields: begin -->\n", "<!-- fields: end -->\n"
BODIES: dict[str, type[Body]] = {"chat": ChatBody, "completions": CompletionBody, "embeddings": EmbeddingBody}
WORDS = {"served": "yes", "not yet": "refused", "ignored": "ignored", None: ""}

OPENAI, VLLM, PENSTOCK = "OpenAI", "vLLM", "penstock"
SECTIONS = {
    "Prompt": (
        ("messages", OPENAI, "text; with models that see `image_url` and `video_url`; other parts are refused by name"),
        ("prompt", OPENAI, "a text, token ids, or a list of either"),
        ("input", OPENAI, f"the same; at most {MAX_INPUTS}"),
        ("urls", "RTP-LLM", "of images, one for each `<image>`, or token for one, in the prompt; as in `image_url`"),
        ("images", "RTP-LLM", "the same"),
        ("suffix", OPENAI, ""),
        (
            "echo",
            OPENAI,
            "the prompt before the output; with `logprobs` also its own, with `max_tokens: 0` nothing "
            "else. Of a chat the message that `continue_final_message` goes on with",
        ),
        ("add_special_tokens", VLLM, "for a text true by default, for a chat false: templates bring their own"),
        ("truncate_prompt_tokens", VLLM, "keeps the last N tokens; -1 as many as fit beside `max_tokens`"),
        ("truncation_side", VLLM, "what goes: `left` (the default), or `right`, which keeps the first N tokens"),
        ("add_generation_prompt", VLLM, "true by default, unless `continue_final_message` is"),
        ("continue_final_message", VLLM, "the output continues the last message"),
        ("chat_template_kwargs", VLLM, "variables for the model's chat template"),
        ("chat_template", VLLM, "set by the server: `--chat-template`"),
        ("documents", VLLM, ""),
        ("reasoning_effort", OPENAI, "a variable for the chat template; `none` also sets `enable_thinking: false`"),
        ("prompt_embeds", VLLM, ""),
        ("mm_processor_kwargs", VLLM, ""),
        ("media_io_kwargs", VLLM, ""),
        ("audio", OPENAI, ""),
        ("prediction", OPENAI, "text that the answer is expected to repeat: it may come sooner, and is the same"),
        ("web_search_options", OPENAI, ""),
    ),
    "Sampling": (
        ("temperature", OPENAI, "below 1e-5 is greedy"),
        ("top_p", OPENAI, ""),
        ("top_k", VLLM, "0 or -1 is all"),
        ("min_p", VLLM, ""),
        ("seed", OPENAI, "the same tokens on every run; output i is sampled with seed + i"),
        ("presence_penalty", OPENAI, ""),
        ("frequency_penalty", OPENAI, ""),
        ("repetition_penalty", VLLM, ""),
        ("logit_bias", OPENAI, ""),
        ("allowed_token_ids", VLLM, "only these are sampled"),
        (
            "bad_words",
            VLLM,
            f"at most {MAX_BAD_WORDS}; matched as tokens, with and without a leading space",
        ),
        ("logits_processors", VLLM, ""),
        ("repetition_detection", VLLM, ""),
        ("watermarking", VLLM, ""),
        ("response_format", OPENAI, "`text`, `json_object` or `json_schema`; see below"),
        (
            "structured_outputs",
            VLLM,
            "exactly one of `json`, `json_object`, `regex`, `choice`, `grammar`, `structural_tag`; with JSON also "
            "`disable_any_whitespace` or `whitespace_pattern`",
        ),
        ("tools", OPENAI, f"of type `function`, at most {MAX_TOOLS}; see below"),
        (
            "tool_choice",
            OPENAI,
            "`none` (the model is not shown them), `auto`, `required`, a function, or `allowed_tools`",
        ),
        ("parallel_tool_calls", OPENAI, "with `false` there is at most one call"),
        ("functions", OPENAI, ""),
        ("function_call", OPENAI, ""),
    ),
    "Length": (
        (
            "max_tokens",
            OPENAI,
            "16 by default for completions, for chat what fits; a given value must fit beside the prompt",
        ),
        ("max_completion_tokens", OPENAI, "takes precedence over `max_tokens`"),
        ("min_tokens", VLLM, "until then no stop token is sampled, and stop strings are ignored"),
        ("stop", OPENAI, f"at most {MAX_STOP_STRINGS} strings"),
        ("stop_token_ids", VLLM, ""),
        ("ignore_eos", VLLM, ""),
        ("include_stop_str_in_output", VLLM, ""),
        ("n", OPENAI, f"at most {MAX_N}"),
        ("best_of", OPENAI, ""),
        ("use_beam_search", VLLM, "not with `stream`; see below"),
        (
            "length_penalty",
            VLLM,
            f"-{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}, with `use_beam_search`; 1 by default",
        ),
        ("early_stopping", VLLM, 'true, false (by default) or `"never"`, with `use_beam_search`'),
        (
            "thinking",
            PENSTOCK,
            "`{start, end, budget}`: what comes before the output proper, by token ids of its markers, and its bound",
        ),
        ("thinking_token_budget", VLLM, "after so many tokens reasoning is ended; -1 is any number"),
    ),
    "Response": (
        ("stream", OPENAI, ""),
        ("stream_options", OPENAI, "only with `stream`"),
        ("stream_options.include_usage", OPENAI, ""),
        ("stream_options.continuous_usage_stats", VLLM, "with `include_usage`: usage so far in every event"),
        ("stream_options.include_obfuscation", OPENAI, "events are never padded"),
        ("logprobs", OPENAI, f"of the raw logits; for completions a number from 0 to {MAX_LOGPROBS}"),
        ("top_logprobs", OPENAI, f"0 to {MAX_LOGPROBS}, or -1 for all of the vocabulary; with `logprobs`"),
        (
            "prompt_logprobs",
            VLLM,
            f"0 to {MAX_LOGPROBS}, or -1 for all of the vocabulary; not with `stream`; cached prefixes are not used",
        ),
        ("return_token_ids", VLLM, "`prompt_token_ids` and `token_ids` in the response, also when streamed"),
        ("logprob_token_ids", VLLM, "at most 128 tokens, reported beside the chosen one instead of the likeliest"),
        ("return_tokens_as_token_ids", VLLM, "log-probabilities name tokens `token_id:ID`"),
        ("return_prompt_text", VLLM, ""),
        ("skip_special_tokens", VLLM, ""),
        ("encoding_format", OPENAI, "`float` (the default), or `base64`: float32, little-endian"),
        ("dimensions", OPENAI, "the first so many numbers, normalised again; at most the model's hidden size"),
        ("normalize", VLLM, "by default as the checkpoint says, and true where it says nothing"),
        ("embed_dtype", VLLM, ""),
        ("endianness", VLLM, ""),
        ("use_activation", VLLM, "the same as `normalize`"),
        ("padding", VLLM, "`do_not_pad` (the default), or `max_length`: the tokenizer's padding follows the prompt"),
        ("spaces_between_special_tokens", VLLM, ""),
        ("include_reasoning", VLLM, "`false` leaves reasoning out of the answer"),
        ("modalities", OPENAI, ""),
        ("verbosity", OPENAI, ""),
    ),
    "Serving": (
        ("model", OPENAI, "optional"),
        ("priority", VLLM, "lower runs first"),
        ("slo", PENSTOCK, "`{ttft_ms, tpot_ms}`, or the headers `x-llm-d-slo-ttft-ms` and `x-llm-d-slo-tpot-ms`"),
        (
            "service_tier",
            OPENAI,
            "`flex`: offline work; `priority`: `priority: -1`, unless that says otherwise; `scale` is `default`",
        ),
        ("cache_salt", VLLM, "cached prefixes are shared only among requests with the same one"),
        ("prompt_cache_key", OPENAI, "requests with the same key prefer the same instance"),
        ("prompt_cache_retention", OPENAI, ""),
        (
            "kv_transfer_params",
            VLLM,
            "only `{prompt_token_ids}`, the tokens of these messages; where a request runs the service decides",
        ),
        ("ec_transfer_params", VLLM, "the same"),
        ("vllm_xargs", VLLM, ""),
        ("user", OPENAI, "accepted, not used"),
        ("metadata", OPENAI, "accepted, not used"),
        ("safety_identifier", OPENAI, ""),
        ("store", OPENAI, "nothing is stored"),
        ("session_id", VLLM, "use `prompt_cache_key`"),
        ("request_id", VLLM, "use the header `X-Request-Id`"),
    ),
}


def tables() -> str:
    """Markdown. Raises AssertionError when SECTIONS does not list exactly the fields of the bodies."""
    status = {name: field_table(body) for name, body in BODIES.items()}
    listed = [field for rows in SECTIONS.values() for field, _, _ in rows]
    known = {field for table in status.values() for field in table}
    assert sorted(listed) == sorted(known), f"not one row each: {sorted(known ^ set(listed)) or 'some come twice'}"
    return "\n".join(_section(title, status) for title, status in ((title, status) for title in SECTIONS))


def _section(title: str, status: dict[str, dict[str, str]]) -> str:
    lines = [
        f"**{title}**\n",
        "| field | from | " + " | ".join(BODIES) + " | |",
        "|---|---|" + "---|" * len(BODIES) + "---|",
    ]
    for field, origin, remark in SECTIONS[title]:
        words = [WORDS[table.get(field)] for table in status.values()]
        notes = [remark] if remark else []
        if "refused" in words and (harmless := NOT_YET[field]):
            notes.append(f"accepted: {' or '.join(f'`{_json(value)}`' for value in harmless)}")
        lines.append(f"| `{field}` | {origin} | {' | '.join(words)} | {'; '.join(notes)} |")
    return "\n".join(lines) + "\n"


def _json(value: object) -> str:
    import json

    return json.dumps(value)


def removed() -> str:
    """One sentence."""
    names = ", ".join(f"`{prefix}*`" for prefix in REMOVED_PREFIXES)
    return f"Fields of older servers are refused by prefix: {names}.\n"


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + tables() + "\n" + removed() + "\n" + END + after


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page())
    elif "--check" in sys.argv:
        if page() != PAGE.read_text():
            sys.exit(f"{PAGE} is out of date; run python tools/api_table.py --write")
    else:
        print(tables())
