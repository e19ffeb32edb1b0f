"""A function of this program called by the model, with the `openai` client.

Run `penstock serve demo`, then `python examples/tools.py [URL]`.

The demo model was never trained to call functions, so the call is required: its arguments then follow their schema.
"""

import json
import sys
from datetime import datetime, timedelta, timezone
from typing import Any

from openai import OpenAI

OFFSETS = {"UTC": 0, "Oslo": 1, "Tokyo": 9}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "time_in",
        "description": "The time of day in a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": list(OFFSETS)}}, "required": ["city"]},
    },
}


def time_in(city: str) -> str:
    return datetime.now(timezone(timedelta(hours=OFFSETS[city]))).strftime("%H:%M")


client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id
messages: list[Any] = [{"role": "user", "content": "How late is it in Tokyo?"}]
asked: Any = {"model": model, "tools": [TOOL], "max_tokens": 100, "seed": 1, "parallel_tool_calls": False}
message = client.chat.completions.create(messages=messages, tool_choice="required", **asked).choices[0].message
messages.append(message.model_dump(exclude_none=True))
for call in message.tool_calls or []:
    assert call.type == "function"
    result = time_in(**json.loads(call.function.arguments))
    print(f"{call.function.name}({call.function.arguments}) -> {result}")
    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
answer = client.chat.completions.create(messages=messages, tool_choice="none", **asked)
print(answer.choices[0].message.content)
