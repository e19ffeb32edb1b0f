"""Engines for tests: small, with exact limits, and run to the end."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.core.clock import SystemClock
from penstock.core.request import Request, TokenLogprobs
from penstock.core.sampling import SamplingParams
from penstock.engine.loop import Engine
from penstock.engine.runner import Runner
from penstock.kv.pool import BlockPool
from penstock.nn.loader import load_model
from penstock.nn.models.decoder import Decoder
from penstock.sched.local import Limits, Scheduler


def make_engine(
    model: Decoder | Path,
    *,
    budget: int = 512,
    sequences: int = 16,
    blocks: int = 64,
    model_len: int = 1024,
    prefix_cache: bool = True,
    device: str = "cpu",
) -> Engine:
    if isinstance(model, Path):
        model = load_model(model, torch.device(device))
    limits = Limits(token_budget=budget, max_sequences=sequences, max_model_len=model_len)
    scheduler = Scheduler(limits, BlockPool(blocks), prefix_cache=prefix_cache)
    return Engine(scheduler, Runner(model, blocks), SystemClock())


def make_request(
    name: str, prompt: list[int], *, seed: int = 0, max_tokens: int = 24, stop_ids=(), priority: int = 0, **params
) -> Request:
    return Request(
        id=name,
        prompt=prompt,
        params=SamplingParams(**{"temperature": 0.0, **params}),
        seed=seed,
        stop_ids=frozenset(stop_ids),
        max_tokens=max_tokens,
        priority=priority,
    )


class Collector:
    """Runs an engine and keeps what every request got."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.cached: dict[str, int] = {}
        self.finish: dict[str, str] = {}

    def step(self) -> None:
        for output in self.engine.step()[0]:
            self.tokens.setdefault(output.request_id, []).extend(output.tokens)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
            self.cached[output.request_id] = output.cached_tokens
            if output.finish is not None:
                self.finish[output.request_id] = output.finish
        self.engine.check()

    def run(self, *requests: Request) -> dict[str, list[int]]:
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            self.step()
        return self.tokens
