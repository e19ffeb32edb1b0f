"""Builds an engine from its options: loads the model, sizes the KV cache, connects the parts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from penstock.core.clock import Clock
from penstock.core.device import ModelShape
from penstock.core.errors import ConfigError
from penstock.core.layout import KV_DTYPES, KVLayout, window_of
from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import ContiguousCache, KVCache, make_layout
from penstock.engine.cache_log import ledger_of
from penstock.engine.executor.inline import SHORT, InlineExecutor
from penstock.engine.host_tier import check_host_tier, open_host_tier
from penstock.engine.loop import Engine
from penstock.engine.memory import check_asked, free_bytes, mapping_budget, size_cache
from penstock.engine.runner import Runner
from penstock.kv.keys import root_key
from penstock.kv.pool import BlockPool, Published
from penstock.kv.tier import Tier
from penstock.nn.config import DTYPES
from penstock.nn.graph import MODES, Mode, obstacle
from penstock.nn.loader import identity, load_model
from penstock.nn.models.decoder import Decoder
from penstock.nn.ops.attention import reads_in_place
from penstock.nn.rope import longest
from penstock.nn.weight_cache import WeightCache
from penstock.sched.local import Limits, Scheduler, make_local_policy
from penstock.sched.local.limits import StepBudget, host_blocks
from penstock.sched.local.offload import Offload
from penstock.sched.local.policy.base import StepLimit
from penstock.sched.local.sequence import blocks_for
from penstock.sched.local.speculation import make_speculation
from penstock.text.grammar import Grammars
from penstock.transfer.pool import KVPool, OpenPool, SharedPool, anonymous_pool, memfd_pool

log = logging.getLogger("penstock.engine")
MOST_TOKENS = 8192  # in a step, however fast the device is


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """An engine's options; None leaves the choice to the engine.

    Attributes:
        model: a Hugging Face checkpoint folder.
        device: "cpu", "cuda", "cuda:1"; None takes CUDA where there is one.
        dtype: "bfloat16", "float16" or "float32"; None or "auto" takes the checkpoint's.
        kv_cache_dtype: that K and V are stored in, a name in `core.layout.KV_DTYPES`; "auto" is `dtype`.
        max_model_len: prompt and output tokens of one sequence; None takes the checkpoint's, or what fits.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens in one step; None finds out how many stay within `step_time_limit_ms`.
        step_time_limit_ms: of a step with prompts; None is the default (`StepLimit.asked`).
        kv_cache_memory: bytes of KV cache.
        host_cache_memory: bytes of a tier of copies in the host's memory, below a CUDA device; None is no such tier.
        gpu_memory_utilization: on CUDA, the share of the device's memory that may be used.
        prefix_cache: whether computed prefixes are found again.
        kv_address_mode: "contiguous" or "table" (engine/cache.py); "auto" is what measured faster: on a CPU, table with
            our own kernels and contiguous with torch's; table on CUDA, which has nothing else yet.
        kv_layout: "block" or "token", how a block is laid out (core/layout.py); "auto" is "block", which measured
            faster in either mode.
        scheduling_policy: a name in `sched.local.LOCAL_POLICIES`.
        speculative_config: see `sched.local.speculation.make_speculation`.
        graph_mode: "eager", "partial", "full" or "auto": how a step is computed (nn/graph.py).
        async_scheduling: whether the next step is scheduled while one runs (sched/local/steps.py).
        weight_cache: whether packed weights are kept on disk, and mapped at the next start (nn/weight_cache.py).
    """

    model: str
    device: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    step_time_limit_ms: float | None = None
    kv_cache_memory: int | None = None
    host_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True
    kv_address_mode: str = "auto"
    kv_layout: str = "auto"
    scheduling_policy: str = "slack"
    speculative_config: str = "auto"
    graph_mode: str = "auto"
    async_scheduling: bool = True
    weight_cache: bool = True


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and its parts.

    Attributes:
        layout: of a block.
        shape: of the model.
        pool: where its blocks are; None on CUDA, where they are in the device's own memory.
    """

    engine: Engine
    runner: Runner
    layout: KVLayout
    shape: ModelShape
    pool: KVPool | None

    def close(self) -> None:
        """Release the KV memory; the engine cannot be used afterwards."""
        self.engine.close()
        self.runner.cache.close()
        if self.pool is not None:
            self.pool.close()


def build_engine(options: EngineOptions, clock: Clock, open_pool: OpenPool = memfd_pool) -> Built:
    """Load, size and connect.

    Args:
        open_pool: where the KV cache's blocks come from.

    Raises:
        ConfigError: a checkpoint or an option that cannot be served, or a KV pool server that refuses.
        Unavailable: there is no KV pool server.
    """
    _check(options)
    speculation = make_speculation(options.speculative_config)
    device = _device(options.device)
    if device.type == "cpu" and KV_DTYPES[options.kv_cache_dtype] == "float8_e4m3fn":
        raise ConfigError(
            f"kv-cache-dtype: {options.kv_cache_dtype!r}, there are no kernels for it on a CPU, allowed are auto, int8",
            "kv-cache-dtype",
        )
    if device.type == "cuda" and options.kv_address_mode == "contiguous":
        raise ConfigError("kv-address-mode: 'contiguous', on a CUDA device only table is there", "kv-address-mode")
    check_host_tier(options.host_cache_memory, device)
    asked = options.kv_cache_memory
    # blocks inherited from the previous incarnation are not free, but are this engine's: its pool is made as large
    promised = open_pool.promised if isinstance(open_pool, SharedPool) else 0
    if asked is not None and not promised:  # without the model, which takes long to load
        check_asked(asked, device)
    weights = WeightCache() if options.weight_cache else None
    model = load_model(Path(options.model), device, _dtype(options.dtype), weights, model_len=options.max_model_len)
    mode = options.graph_mode
    if mode in ("partial", "full") and (reason := obstacle(model, cast(Mode, mode))) is not None:
        raise ConfigError(f"graph-mode: {mode!r} is not to be had, {reason}", "graph-mode")
    model_len = _model_len(model, options.max_model_len)
    limit = StepLimit.asked(options.step_time_limit_ms, cpu=device.type == "cpu")
    budget = _step_budget(options, model_len, limit)
    if model.device.type == "cuda":
        _touch_memory(model, budget.high, options.kv_cache_dtype)
    wanted = model_len
    name = "-".join(filter(None, (identity(Path(options.model)), model.config.variant)))
    order = _chosen(options.kv_layout, "block")
    layout = make_layout(model.config, model.dtype, order, name, options.kv_cache_dtype)
    slots = host_blocks(options.host_cache_memory, layout.block_bytes, prefix_cache=options.prefix_cache)
    if asked is not None:
        check_asked(asked - asked % layout.block_bytes, model.device, promised)
    num_blocks, model_len = size_cache(
        available=asked
        or promised
        or free_bytes(model.device, options.gpu_memory_utilization, model.config.num_layers),
        block_bytes=layout.block_bytes,
        max_sequences=options.max_num_seqs,
        model_len=model_len,
        asked_model_len=options.max_model_len,
        exact=asked is not None,
    )
    if model_len < wanted:
        log.warning("sequences are cut to %d of %d tokens: no more KV cache fits", model_len, wanted)
    cache, pool = _open_cache(options, model, layout, num_blocks, model_len, open_pool)
    blocks = _block_pool(pool, num_blocks, options.prefix_cache, windowed=window_of(layout.groups) is not None)
    limits = Limits(token_budget=budget.tokens, max_sequences=options.max_num_seqs, max_model_len=model_len)
    root = root_key(layout.model, layout.dtype, layout.kv_dtype)
    policy = make_local_policy(options.scheduling_policy, None, limit)  # the server says what predicts steps
    mover = open_host_tier(cache, slots) if slots else None
    offload = Offload(blocks, Tier(slots)) if slots else None
    scheduler = Scheduler(
        limits,
        blocks,
        root=root,
        prefix_cache=options.prefix_cache,
        policy=policy,
        offload=offload,
        speculation=speculation,
        window=window_of(layout.groups),
    )
    runner = Runner(model, cache, options.graph_mode, Grammars(Path(options.model), model.config.vocab_size))
    log.info(
        "%s on %s, %s: %d blocks (%.0f MiB) of KV cache in %s, %s, %d of them restored, sequences up to %d tokens, "
        "steps up to %d tokens",
        type(model).__name__,
        model.device,
        layout.dtype,
        num_blocks,
        num_blocks * layout.block_bytes / 2**20,
        layout.kv_dtype,
        cache.address_mode,
        blocks.cached,
        model_len,
        budget.high,
    )
    if weights is not None:
        weights.save_later()
    found = budget if budget.tokens < budget.high else None
    executor = InlineExecutor(
        runner, clock, ahead=options.async_scheduling, short=SHORT if device.type == "cpu" else 0.0
    )
    if executor.thread is not None:
        runner.computing = executor.thread.bell.computing
    engine = Engine(scheduler, executor, clock, ledger_of(pool), found, cache.prefaulter, mover)
    return Built(engine, runner, layout, _shape(model).storing(options.kv_cache_dtype), pool)


def _open_cache(
    options: EngineOptions,
    model: Decoder,
    layout: KVLayout,
    num_blocks: int,
    model_len: int,
    open_pool: OpenPool,
) -> tuple[KVCache, KVPool | None]:
    """The pool is None on CUDA."""
    if model.device.type == "cuda":
        if open_pool is not memfd_pool:
            raise ConfigError("kv_pool: KV blocks on a CUDA device cannot be shared between processes yet", "kv_pool")
        return KVCache.on_device(layout, num_blocks, model.device), None
    table = _chosen(options.kv_address_mode, _faster_mode(model)) == "table"
    if table and open_pool is memfd_pool:
        open_pool = anonymous_pool
    pool = open_pool(layout, num_blocks)
    try:
        if table:
            return KVCache.over_pool(layout, pool.memory), pool
        ranges = {"max_sequences": options.max_num_seqs, "range_blocks": blocks_for(model_len)}
        return ContiguousCache(layout, pool.memory, **ranges, budget=mapping_budget()), pool
    except BaseException:
        pool.close()
        raise


def _block_pool(pool: KVPool | None, num_blocks: int, prefix_cache: bool, *, windowed: bool) -> BlockPool:
    """A block pool with the blocks inherited from this engine's previous incarnation, if any."""
    if pool is None:
        return BlockPool(range(num_blocks), windowed=windowed)
    blocks = BlockPool([*(record.block for record in pool.inherited), *pool.blocks], pool.client, windowed=windowed)
    if prefix_cache:
        blocks.restore(Published(r.block, r.key, r.parent) for r in pool.inherited)
    return blocks


def _shape(model: Decoder) -> ModelShape:
    config = model.config
    return ModelShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_embeddings,
        bytes_per_value=model.dtype.itemsize,
    )


def _faster_mode(model: Decoder) -> str:
    """Kernels that read blocks where they lie gain nothing by ranges, and prompts need not wait for mappings."""
    return "table" if reads_in_place(model.device.type, model.dtype) else "contiguous"


def _chosen(option: str, auto: str) -> str:
    return auto if option == "auto" else option


def _check(options: EngineOptions) -> None:
    """Ranges, in the flags' names."""
    ranges = {
        "max-num-seqs": (options.max_num_seqs, 1, 65536),
        "step-time-limit-ms": (options.step_time_limit_ms, 1e-3, 1e6),
        "gpu-memory-utilization": (options.gpu_memory_utilization, 0.01, 1.0),
    }
    for name, (value, low, high) in ranges.items():
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name}: {value}, allowed is {low:g} to {high:g}", name)
    choices = {
        "kv-address-mode": (options.kv_address_mode, ("auto", "contiguous", "table")),
        "kv-cache-dtype": (options.kv_cache_dtype, tuple(KV_DTYPES)),
        "kv-layout": (options.kv_layout, ("auto", "block", "token")),
        "graph-mode": (options.graph_mode, MODES),
    }
    for name, (choice, allowed) in choices.items():
        if choice not in allowed:
            raise ConfigError(f"{name}: {choice!r}, allowed are {', '.join(allowed)}", name)


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device: {name!r}, allowed are cpu, cuda, cuda:N", "device") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r}, allowed are cpu, cuda, cuda:N", "device")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r}, this machine has {torch.cuda.device_count()} CUDA devices", "device")
    return device


def _dtype(name: str | None) -> torch.dtype | None:
    if name in (None, "auto"):
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r}, allowed are auto, {', '.join(DTYPES)}", "dtype")
    return DTYPES[name]


def _model_len(model: Decoder, asked: int | None) -> int:
    most = longest(model.config)
    if asked is not None and not 2 <= asked <= most:
        raise ConfigError(f"max-model-len: {asked}, this checkpoint allows 2 to {most}", "max-model-len")
    return asked or most


def _step_budget(options: EngineOptions, model_len: int, limit: StepLimit) -> StepBudget:
    """Of one size when that was asked for."""
    asked, least = options.max_num_batched_tokens, options.max_num_seqs
    if asked is not None and asked < least:
        raise ConfigError(
            f"max-num-batched-tokens: {asked}, at least max-num-seqs ({least}) is needed, "
            "so that every running sequence gets a token in every step",
            "max-num-batched-tokens",
        )
    low, high = (asked, asked) if asked is not None else (least, max(min(MOST_TOKENS, model_len), least))
    return StepBudget(low, high, limit.most / 1e3)


def _touch_memory(model: Decoder, tokens: int, kv_cache_dtype: str) -> None:
    """Read a prompt of so many tokens, so that the memory to work in is known before the cache gets the rest."""
    layout = make_layout(model.config, model.dtype, "block", "", kv_cache_dtype)
    blocks = tuple(range(blocks_for(tokens)))
    params = SamplingParams(temperature=0.0)
    plan = StepPlan((SequenceStep("warm-up", 0, [0] * tokens, blocks, 1, params, 0),), blocks)
    Runner(model, KVCache.on_device(layout, len(blocks), model.device)).run(plan)
