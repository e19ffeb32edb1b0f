"""Concurrent conversations against the deployment of examples/deployment.yaml.

Run `penstock up examples/deployment.yaml`, then `python examples/deployment_client.py [URL]`.

The turns of a conversation carry the same `prompt_cache_key`: they go to the same instance where that saves prefill.
"""

import asyncio
import sys
from typing import Any

from openai import AsyncOpenAI

QUESTIONS = ("What does os.path.join do?", "And os.path.split?", "What is the difference?")


async def converse(client: AsyncOpenAI, name: str) -> tuple[int, int]:
    """Prompt tokens of all turns, and how many of them were found in a prefix cache."""
    prompt_tokens = cached_tokens = 0
    messages: list[Any] = [{"role": "user", "content": f"This is {name}. " + "Explain the os module in detail. " * 20}]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = await client.chat.completions.create(
            model="demo", messages=messages, max_tokens=32, temperature=0, extra_body={"prompt_cache_key": name}
        )
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
        assert answer.usage is not None
        prompt_tokens += answer.usage.prompt_tokens
        details = answer.usage.prompt_tokens_details
        cached_tokens += (details.cached_tokens or 0) if details else 0
    return prompt_tokens, cached_tokens


async def main(url: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        counts = await asyncio.gather(*(converse(client, f"conversation-{i}") for i in range(4)))
    prompt, cached = map(sum, zip(*counts, strict=True))
    print(f"{len(counts)} conversations: {prompt} prompt tokens, {cached} of them from prefix caches")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"))
