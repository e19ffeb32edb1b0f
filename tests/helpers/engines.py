"""Engines for tests: small, with exact limits, and run to the end."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

import torch

from penstock.core.clock import SystemClock
from penstock.core.layout import windows_of
from penstock.core.request import Pooling, Request, TokenLogprobs
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import ContiguousCache, KVCache, make_layout
from penstock.engine.disk_tier import DiskSlots
from penstock.engine.executor import InlineExecutor
from penstock.engine.host_tier import HostSlots, PinnedSlots
from penstock.engine.loop import Engine
from penstock.engine.media import LookingThread
from penstock.engine.memory import MAPPINGS
from penstock.engine.mover import Mover, SlotMover, Slots
from penstock.engine.remote_tier import open_remote_tier
from penstock.engine.runner import Runner
from penstock.kv.pool import BlockPool
from penstock.kv.shared_tier import SharedTier
from penstock.kv.tier import Tier
from penstock.nn.loader import load_model
from penstock.nn.models.decoder import Decoder
from penstock.sched.local import Limits, LocalPolicy, Scheduler
from penstock.sched.local.lane import Lane
from penstock.sched.local.offload import Offload
from penstock.sched.local.sequence import blocks_for
from penstock.sched.local.speculation import Speculation
from penstock.text.grammar import Grammars
from penstock.transfer.memory import PoolMemory, checksum_of

try:
    import xxhash  # noqa: F401
except ImportError:  # where only model libraries are installed, any checksum will do
    CHECKSUM: Callable[[memoryview], int] = zlib.crc32
else:
    CHECKSUM = checksum_of


def make_engine(
    model: Decoder | Path,
    *,
    budget: int = 512,
    sequences: int = 16,
    blocks: int = 64,
    model_len: int = 1024,
    prefix_cache: bool = True,
    device: str = "cpu",
    address_mode: str = "contiguous",
    order: str = "block",
    kv_cache_dtype: str = "auto",
    mapping_budget: int = MAPPINGS,
    policy: LocalPolicy | None = None,
    ahead: bool = True,
    slots: int = 0,
    disk: Path | None = None,
    host: bool | None = None,
    store: str | None = None,
    graph_mode: str = "auto",
    way: Callable[[Slots], Slots] = lambda way: way,
    grammars: Grammars | None = None,
    speculation: Speculation | None = None,
    media_tokens: int = 1 << 20,
    beside: bool = False,
) -> Engine:
    """On CUDA the cache is a tensor of the device, addressed by table.

    Args:
        blocks: of tokens; the cache has as many for each group of layers.
        slots: of tiers below the device, as blocks; 0 is none.
        disk: where such a tier is; None is none.
        host: whether there is one in the host's memory; by default where there is no other one.
        store: URL of what is a further tier; None is none.
        way: what carries blocks there, made of what usually does.
        beside: whether images are looked at beside steps.
    """
    if isinstance(model, Path):
        model = load_model(model, torch.device(device))
    layout = make_layout(model.config, model.dtype, order, "test", kv_cache_dtype)
    blocks *= len(layout.groups)
    if model.device.type == "cuda":
        cache = KVCache.on_device(layout, blocks, model.device)
    else:
        memory = PoolMemory.memfd(blocks, layout.block_bytes)
        if address_mode == "table" or len(layout.groups) > 1:
            cache = KVCache.over_pool(layout, memory)
        else:
            ranges = {"max_sequences": sequences, "range_blocks": blocks_for(model_len), "budget": mapping_budget}
            cache = ContiguousCache(layout, memory, **ranges)
        memory.close()  # the cache has its own mapping
    limits = Limits(token_budget=budget, max_sequences=sequences, max_model_len=model_len)
    windows = windows_of(layout.groups)
    pool, lanes, movers = BlockPool(range(blocks), windowed=windows[0] is not None), list[Lane](), dict[str, Mover]()
    slots *= len(windows)
    if slots and (disk is None and store is None if host is None else host):
        lanes.append(Lane(Tier(slots), mirrors=True))
        movers["host"] = SlotMover(way((HostSlots if cache.slots.is_cpu else PinnedSlots)(cache, slots)), CHECKSUM)
    if slots and disk is not None:
        on_disk = DiskSlots(cache, disk, slots)
        tier = Tier(slots, "disk")
        tier.restore(on_disk.kept)
        lanes.append(Lane(tier))
        movers["disk"] = SlotMover(way(on_disk), CHECKSUM, on_disk)
    if store is not None:
        remote = open_remote_tier(cache, store)
        movers["remote"] = remote.mover
        lanes.append(Lane(SharedTier(), remote.block_seconds))
    scheduler = Scheduler(
        limits,
        pool,
        prefix_cache=prefix_cache,
        policy=policy,
        offload=Offload(pool, lanes) if lanes else None,
        speculation=speculation,
        windows=windows,
        media_tokens=media_tokens,
        encodes_beside=beside,
    )
    clock, runner = SystemClock(), Runner(model, cache, graph_mode, grammars)
    runner.media.thread = looks = LookingThread(model.device) if beside else None
    executor = InlineExecutor(runner, clock, ahead=ahead, short=0.0)
    return Engine(scheduler, executor, clock, movers=movers, looks=looks)


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


def make_embedding(name: str, prompt: list[int], pooling: Pooling, *, priority: int = 0) -> Request:
    return Request(
        id=name,
        prompt=prompt,
        params=SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        max_tokens=0,
        priority=priority,
        pooling=pooling,
    )


class Collector:
    """Runs an engine and keeps what every request got."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.starts: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.finish: dict[str, str] = {}
        self.embeddings: dict[str, list[float]] = {}

    def step(self) -> None:
        for output in self.engine.step()[0]:
            self.tokens.setdefault(output.request_id, []).extend(output.tokens)
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs or [])
            self.starts.setdefault(output.request_id, []).append(output.start)
            self.cached[output.request_id] = output.cached_tokens
            if output.embedding is not None:
                self.embeddings[output.request_id] = output.embedding
            if output.finish is not None:
                self.finish[output.request_id] = output.finish
        self.engine.check()

    def run(self, *requests: Request) -> dict[str, list[int]]:
        for request in requests:
            self.engine.add(request)
        while self.engine.has_work:
            self.step()
        return self.tokens
