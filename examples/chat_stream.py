"""A streamed chat with the `openai` client.

Run `penstock serve demo`, then `python examples/chat_stream.py [URL]`.
"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": "What does os.path.join do?"}],
    max_tokens=60,
    seed=1,  # the same seed brings the same tokens, whatever else the server does
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
    if chunk.usage:  # in the last chunk
        print(f"\n\n{chunk.usage.prompt_tokens} prompt tokens, {chunk.usage.completion_tokens} completion tokens")
