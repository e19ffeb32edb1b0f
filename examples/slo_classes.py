"""Latency targets (SLOs) for interactive requests, beside offline work without any.

Run `penstock serve demo`, then `python examples/slo_classes.py [URL]`.

Interactive requests state their targets: time to first token (TTFT) and mean time per token after it (TPOT). Requests
of the service tier "flex" are offline work, which runs in the capacity that the others leave.
"""

import asyncio
import sys
import time

from openai import AsyncOpenAI

TARGETS = {"ttft_ms": 500, "tpot_ms": 50}


async def complete(client: AsyncOpenAI, prompt: str, **fields: object) -> tuple[float, float]:
    """TTFT and TPOT of one request, in ms."""
    start = time.perf_counter()
    stream = await client.completions.create(
        model="demo", prompt=prompt, max_tokens=48, stream=True, extra_body={"ignore_eos": True, **fields}
    )
    times = [time.perf_counter() async for chunk in stream if chunk.choices]
    return (times[0] - start) * 1e3, (times[-1] - times[0]) / 47 * 1e3


async def main(url: str) -> None:
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        offline = [complete(client, f"import module_{i}\n", service_tier="flex") for i in range(12)]
        interactive = [complete(client, f"class Chat{i}:", slo=TARGETS) for i in range(4)]
        measured = await asyncio.gather(*offline, *interactive)
    for name, part in (("offline", measured[:12]), ("interactive", measured[12:])):
        ttft, tpot = (sum(values) / len(values) for values in zip(*part, strict=True))
        print(f"{name}: {len(part)} requests, mean TTFT {ttft:.0f} ms, mean TPOT {tpot:.1f} ms")
    met = sum(ttft <= TARGETS["ttft_ms"] and tpot <= TARGETS["tpot_ms"] for ttft, tpot in measured[12:])
    print(f"{met} of 4 interactive requests met their targets, as measured by this client")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"))
