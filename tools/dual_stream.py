"""What images cost answers of text on one engine, with and without looking at them beside steps (dual stream).

    python -m tools.dual_stream [cpu | cuda]

A random Qwen2.5-VL of 0.2 billion parameters answers four prompts of text, and from their twentieth step on images of
256 tokens come, one each 0.7 s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import numpy as np

from penstock.core.clock import SystemClock
from penstock.core.request import MediaSpan, Request
from penstock.core.sampling import SamplingParams
from penstock.engine.build import EngineOptions, build_engine
from tools.make_checkpoint import SEES, write

STREAMS, IMAGES, EVERY = 4, 4, 0.7  # answers of text; images, and seconds between two
SIDE = 16  # of an image, in tokens, each of 28 x 28 pixels


def asking(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(temperature=0.0)
    return Request(id=name, prompt=prompt, params=params, seed=0, stop_ids=frozenset(), max_tokens=max_tokens)


def seeing(name: str, number: int) -> Request:
    """A request with an image of its own between some text."""
    pixels = np.random.default_rng(number).integers(0, 256, (1, 28 * SIDE, 28 * SIDE, 3), dtype=np.uint8).tobytes()
    digest = blake2b(pixels, digest_size=16).digest()
    span = MediaSpan(10, SIDE**2, digest, "image", (1, SIDE, SIDE), 1.0, (1, 28 * SIDE, 28 * SIDE))
    request = asking(name, [1] * 10 + [SEES["image_token_id"]] * SIDE**2 + [2] * 10, max_tokens=4)
    return replace(request, media=(span,), pixels=(pixels,))


def measure(model: Path, device: str, *, beside: bool) -> None:
    options = EngineOptions(
        model=str(model),
        device=device,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        kv_cache_memory=1 << 28,
        kv_address_mode="table",
        scheduling_policy="fcfs",
        speculative_config="off",
        encode_beside="on" if beside else "off",
    )
    built = build_engine(options, SystemClock())
    engine = built.engine
    for i in range(STREAMS):
        engine.add(asking(f"text {i}", [1 + i] * 60, max_tokens=900))
    for _ in range(20):
        engine.step()
    began = time.perf_counter()
    last, asked = dict.fromkeys(range(STREAMS), began), list[float]()
    gaps, firsts = list[float](), list[float]()
    while len(firsts) < IMAGES:
        now = time.perf_counter()
        if len(asked) < IMAGES and now >= began + EVERY * len(asked):
            engine.add(seeing(f"image {len(asked)}", len(asked)))
            asked.append(now)
        for output in engine.step()[0]:
            kind, number = output.request_id.split()
            now = time.perf_counter()
            if kind == "text":
                gaps.append(now - last[int(number)])
                last[int(number)] = now
            elif not output.start:
                firsts.append(now - asked[int(number)])
    built.close()
    text, image_ms = np.array(gaps) * 1e3, np.array(firsts) * 1e3
    print("beside steps:" if beside else "in steps:", flush=True)
    print(f"  text: {text.mean():.1f} ms a token, at most {text.max():.0f}")
    print(f"  images: {image_ms.mean():.0f} ms to the first token, at most {image_ms.max():.0f}", flush=True)


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        write("qwen2.5-vl-0.2b", Path(folder), device)
        for _ in range(2):
            for beside in (False, True):
                measure(Path(folder), device, beside=beside)


if __name__ == "__main__":
    main()
