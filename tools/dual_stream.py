"""What images cost answers of text on one engine, with and without looking at them beside steps (dual stream).

    python -m tools.dual_stream [cpu | cuda]

A random Qwen2.5-VL of 0.2 billion parameters answers four prompts of text, and from their twentieth step on images of
256 tokens come, one each 0.7 s.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.nn.loader import load_model
from penstock.nn.models.decoder import Decoder
from tests.helpers.checkpoints import SEES, write_checkpoint
from tests.helpers.engines import make_engine, make_request
from tests.helpers.pictures import picture, seeing

STREAMS, IMAGES, EVERY = 4, 4, 0.7  # answers of text; images, and seconds between two


def make_model(folder: Path, device: torch.device) -> Decoder:
    tower = {"hidden_size": 640, "intermediate_size": 1708, "depth": 12, "num_heads": 10, "out_hidden_size": 1024}
    changes: dict[str, Any] = {
        **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 32000},
        **{"num_attention_heads": 16, "num_key_value_heads": 4},
        "vision_config": {**SEES["vision_config"], **tower, "fullatt_block_indexes": [3, 7, 11]},
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
    }
    write_checkpoint(folder, "qwen2.5-vl", dtype=torch.bfloat16, **changes)
    return load_model(folder, device)


def measure(model: Decoder, *, beside: bool) -> None:
    engine = make_engine(model, beside=beside, device=model.device.type, blocks=256, address_mode="table")
    for i in range(STREAMS):
        engine.add(make_request(f"text {i}", [1 + i] * 60, max_tokens=900))
    for _ in range(20):
        engine.step()
    began = time.perf_counter()
    last, asked = dict.fromkeys(range(STREAMS), began), list[float]()
    gaps, firsts = list[float](), list[float]()
    while len(firsts) < IMAGES:
        now = time.perf_counter()
        if len(asked) < IMAGES and now >= began + EVERY * len(asked):
            image = picture(16, 16, len(asked))
            engine.add(seeing(f"image {len(asked)}", [[1] * 10, image, [2] * 10], max_tokens=4))
            asked.append(now)
        for output in engine.step()[0]:
            kind, number = output.request_id.split()
            now = time.perf_counter()
            if kind == "text":
                gaps.append(now - last[int(number)])
                last[int(number)] = now
            elif not output.start:
                firsts.append(now - asked[int(number)])
    engine.close()
    text, image_ms = np.array(gaps) * 1e3, np.array(firsts) * 1e3
    print("beside steps:" if beside else "in steps:", flush=True)
    print(f"  text: {text.mean():.1f} ms a token, at most {text.max():.0f}")
    print(f"  images: {image_ms.mean():.0f} ms to the first token, at most {image_ms.max():.0f}", flush=True)


def main() -> None:
    device = torch.device(sys.argv[1] if len(sys.argv) > 1 else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model", device)
        for _ in range(2):
            for beside in (False, True):
                measure(model, beside=beside)


if __name__ == "__main__":
    main()
