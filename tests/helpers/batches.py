"""Batches as OpenAI's client has them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import openai

from tests.helpers.waiting import eventually

OVER = ("completed", "failed", "expired", "cancelled")


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)


def line(number: int, url: str = "/v1/completions", **body: Any) -> str:
    body = {"prompt": f"line {number}", "max_tokens": 4, "ignore_eos": True} | body
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body}) + "\n"


def submitted(client: openai.OpenAI, lines: Iterable[str], url: Any = "/v1/completions") -> Any:
    file = client.files.create(file=("in.jsonl", "".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")


def over(client: openai.OpenAI, batch_id: str, timeout: float = 60.0) -> Any:
    """The batch, when it is."""

    def found() -> Any:
        batch = client.batches.retrieve(batch_id)
        return batch if batch.status in OVER else None

    return eventually(found, timeout)


def results(client: openai.OpenAI, file_id: str) -> list[Any]:
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
