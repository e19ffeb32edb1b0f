"""Builds an engine from its options: workers load the model, the KV cache is sized, the parts are connected."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from penstock.core.clock import Clock
from penstock.core.device import ModelShape, TowerShape
from penstock.core.errors import ConfigError, RankFailed
from penstock.core.layout import KV_DTYPES, KVLayout, windows_of
from penstock.core.parallel import DATA, EXPERTS, PIPELINE, TENSOR
from penstock.core.plan import StepPlan
from penstock.engine.cache import KVCache
from penstock.engine.calibration import trial
from penstock.engine.disk_tier import SIZE, SIZE_OPTION, check_disk_tier, open_disk_tier
from penstock.engine.executor.base import Computes, Executor, Memory
from penstock.engine.executor.inline import SHORT, InlineExecutor
from penstock.engine.host_tier import check_host_tier, open_host_tier
from penstock.engine.loop import Engine, TierBelow
from penstock.engine.media import LookingThread
from penstock.engine.memory import check_asked, size_cache
from penstock.engine.options import ENCODE_BESIDE, HELPER_KV, EngineOptions, check_options, engine_device
from penstock.engine.runner import Runner
from penstock.engine.worker import Worker
from penstock.kv.keys import root_key
from penstock.kv.pool import BlockPool, Published
from penstock.kv.shared_tier import SharedTier
from penstock.kv.tier import Tier
from penstock.nn import native
from penstock.nn.config import VisionConfig
from penstock.nn.linear import WHOLE, Linear
from penstock.nn.models.decoder import Decoder
from penstock.obs.progress import Report
from penstock.sched.local import Limits, Scheduler, make_local_policy
from penstock.sched.local.lane import Lane
from penstock.sched.local.limits import MOST_TOKENS, StepBudget, tier_blocks
from penstock.sched.local.offload import Offload
from penstock.sched.local.speculation import Speculation, make_speculation
from penstock.transfer.pool import KVPool, OpenPool, SharedPool, ledger_of, memfd_pool

if TYPE_CHECKING:
    from penstock.engine.executor.processes import RankProcesses
    from penstock.engine.weights import WeightManager

__all__ = ["Built", "EngineOptions", "build_engine", "check_engine"]
log = logging.getLogger("penstock.engine")


@dataclass(frozen=True, slots=True)
class Built:
    """An engine and its parts.

    Attributes:
        worker: of this process.
        layout: of a block, or of rank 0's part of it.
        shape: of the model.
        pool: where its blocks are; None on CUDA, where they are in the device's own memory.
        memory: of all ranks, which can be given back.
        store: names the remote tier and what of it its blocks are; "" without one.
    """

    engine: Engine
    worker: Worker
    layout: KVLayout
    shape: ModelShape
    pool: KVPool | None
    memory: Memory
    store: str = ""

    @property
    def runner(self) -> Runner:
        return self.worker.runner

    def trial(self) -> Callable[[StepPlan], object]:
        """Runs plans outside of the engine, while it has no work: in blocks of their own, or, where several ranks must
        have the same, in some of its cache."""
        if self.worker.shard == WHOLE:
            return trial(self.worker.runner.forward)
        return self.engine.try_out

    def close(self) -> None:
        """Release the KV memory; the engine cannot be used afterwards."""
        self.engine.close()
        self.worker.close()


def check_engine(options: EngineOptions, device: torch.device) -> None:
    """Raise ConfigError for what is wrong with options whatever the model and the machine are."""
    check_options(options)
    if device.type == "cpu" and KV_DTYPES[options.kv_cache_dtype] == "float8_e4m3fn":
        raise ConfigError(
            f"kv-cache-dtype: {options.kv_cache_dtype!r}, there are no kernels for it on a CPU, allowed are auto, int8",
            "kv-cache-dtype",
        )
    if device.type == "cuda" and options.kv_address_mode == "contiguous":
        raise ConfigError("kv-address-mode: 'contiguous', on a CUDA device only table is there", "kv-address-mode")
    if device.type == "cpu":  # else it is a matter of the memory that is free
        check_host_tier(options.host_cache_memory, device)
    check_disk_tier(options.disk_cache, options.disk_cache_size, device, options.layout.group_size)
    tier_blocks(options.host_cache_memory, 1, prefix_cache=options.prefix_cache)
    _disk_blocks(options, 1)
    if options.remote_cache is not None:
        from penstock.engine.remote_tier import check_remote_tier  # others need no store's libraries

        ranks, prefix_cache = options.layout.group_size, options.prefix_cache
        check_remote_tier(options.remote_cache, device.type, ranks, prefix_cache=prefix_cache)


def build_engine(
    options: EngineOptions,
    clock: Clock,
    open_pool: OpenPool = memfd_pool,
    progress: Report | None = None,
    peers: WeightManager | None = None,
) -> Built:
    """Load, size and connect.

    Args:
        open_pool: where the KV cache's blocks come from.
        progress: of loading.
        peers: see `Worker`.

    Raises:
        ConfigError: a checkpoint or an option that cannot be served, or a KV pool server that refuses.
        Unavailable: there is no KV pool server.
        RankFailed: a rank's process has ended.
    """
    device = engine_device(options)
    check_engine(options, device)
    if options.isa is not None:
        native.use(options.isa)
    speculation = make_speculation(options.speculative_config)
    check_host_tier(options.host_cache_memory, device)
    # blocks inherited from the previous incarnation are not free, but are this engine's: its pool is made as large
    promised = open_pool.promised if isinstance(open_pool, SharedPool) else 0
    if options.kv_cache_memory is not None and not promised:  # without the model, which takes long to load
        check_asked(_on_one_device(options.kv_cache_memory, options, device), device)
    if options.layout.group_size > 1 and options.kv_address_mode == "auto":
        options = replace(options, kv_address_mode="table")  # a block is of all ranks; no other rank knows of ranges
    others = _start_ranks(options, device, open_pool, peers)
    try:
        return _build(options, clock, open_pool, promised, speculation, others, progress, peers)
    except BaseException as error:
        if others is not None:
            others.close()
            if isinstance(error, RankFailed):
                others.expect_alive()  # which says more of it
        raise


def _build(
    options: EngineOptions,
    clock: Clock,
    open_pool: OpenPool,
    promised: int,
    speculation: Speculation | None,
    others: RankProcesses | None,
    progress: Report | None,
    peers: WeightManager | None,
) -> Built:
    asked, size = options.kv_cache_memory, options.layout.group_size
    worker = Worker(options, None if others is None else others.join(), progress, peers)
    model, layout, budget, wanted = worker.model, worker.layout, worker.budget, worker.max_model_len
    windows = windows_of(layout.groups)
    slots = tier_blocks(options.host_cache_memory, layout.block_bytes, prefix_cache=options.prefix_cache)
    parts = size if model.device.type == "cuda" else 1  # that a block has, each in a memory of its own
    block_bytes = layout.block_bytes * parts
    on_disk = _disk_blocks(options, block_bytes)
    if asked is not None:
        check_asked(_on_one_device(asked - asked % block_bytes, options, model.device), model.device, promised)
    room = [worker.room()]  # before the others', which they find out beside it
    if others is not None:
        room.append(others.room())
    num_blocks, model_len = size_cache(
        available=asked or promised or min(room) * parts,
        block_bytes=block_bytes,
        max_sequences=options.max_num_seqs,
        model_len=wanted,
        asked_model_len=options.max_model_len,
        exact=asked is not None,
        windows=windows,
        chunk=min(budget.high, wanted),
    )
    if model_len < wanted:
        log.warning("sequences are cut to %d of %d tokens: no more KV cache fits", model_len, wanted)
    worker.open(num_blocks, model_len, open_pool)
    cache, pool = worker.runner.cache, worker.pool
    if others is not None:
        others.open(num_blocks, model_len, None if pool is None else pool.memory)
        others.opened()
        if worker.experts is not None:
            others.balance_experts(worker.experts, options)
        if worker.runner.helpers is not None:
            others.want_help(worker.runner.helpers, worker)
    blocks = _block_pool(pool, num_blocks, options.prefix_cache, windowed=windows[0] is not None)
    looks = LookingThread(model.device) if encodes_beside(options, model) else None
    worker.runner.media.thread = looks
    encode_budget = StepBudget(1, MOST_TOKENS, worker.limit.least / 1e3)  # beside streams that go on meanwhile
    limits = Limits(
        token_budget=budget.tokens,
        max_sequences=options.max_num_seqs,
        max_model_len=model_len,
        encode_budget=encode_budget.tokens,
    )
    root = root_key(layout.model, layout.dtype, layout.kv_dtype)
    policy = make_local_policy(options.scheduling_policy, None, worker.limit)  # the server says what predicts steps
    lanes, movers, store = _open_tiers(options, cache, slots, on_disk, worker.files)
    scheduler = Scheduler(
        limits,
        blocks,
        root=root,
        prefix_cache=options.prefix_cache,
        policy=policy,
        offload=Offload(blocks, lanes) if lanes else None,
        speculation=speculation,
        windows=windows,
        tail_interval=options.tail_key_interval,
        stages=options.pipeline_parallel_size,
        encodes_beside=looks is not None,
        media_tokens=options.media_cache_memory // (model.config.hidden_size * model.dtype.itemsize),
    )
    log.info(
        "%s on %s, %s: %d blocks (%.0f MiB) of KV cache in %s, %s, %d of them restored, sequences up to %d tokens, "
        "steps up to %d tokens",
        type(model).__name__,
        model.device if size == 1 else f"{options.layout} of {model.device.type}",
        layout.dtype,
        num_blocks,
        num_blocks * block_bytes / 2**20,
        layout.kv_dtype,
        cache.address_mode,
        blocks.cached,
        model_len,
        budget.high,
    )
    worker.save_weights()
    executor = _executor(worker, clock, others)
    found = budget if budget.tokens < budget.high else None
    finds, media = (encode_budget, options.media_cache_memory) if model.visual is not None else (None, 0)
    engine = Engine(scheduler, executor, clock, ledger_of(pool), found, cache.prefaulter, movers, finds, media, looks)
    memory = worker if others is None else others.memory(worker)
    return Built(engine, worker, layout, shape_of(model).storing(options.kv_cache_dtype), pool, memory, store)


def encodes_beside(options: EngineOptions, model: Decoder) -> bool:
    """Whether images are looked at beside steps. With "auto" that is where a step leaves something to do it with: on
    CUDA, and on a CPU of several threads. Raises ConfigError.

    Ranks of one model have the same at the same step, and so wait.
    """
    layout = options.layout
    together = layout.group_size > 1 or layout.meets
    if options.encode_beside == "on" and together:
        raise ConfigError(f"{ENCODE_BESIDE}: 'on', with several ranks allowed are auto, off", ENCODE_BESIDE)
    if options.encode_beside == "off" or together or model.visual is None:
        return False
    return options.encode_beside == "on" or model.device.type == "cuda" or torch.get_num_threads() > 1


def _executor(worker: Worker, clock: Clock, others: RankProcesses | None) -> Executor:
    """Of this process's worker, and of the other ranks."""
    runner = worker.runner
    computes: Computes = runner
    if worker.options.enable_dbo and others is not None:
        computes = others.split_steps_of(runner)
    if others is not None and (worker.shard.stages > 1 or others.groups is not None):
        return others.pipeline(computes, clock, ahead=worker.options.async_scheduling)
    short = SHORT if runner.device.type == "cpu" else 0.0
    inline = InlineExecutor(computes, clock, ahead=worker.options.async_scheduling, short=short)
    if inline.thread is not None:
        runner.computing = inline.thread.bell.computing
    return inline if others is None else others.executor(inline)


def _open_tiers(
    options: EngineOptions, cache: KVCache, slots: int, on_disk: int, files: str
) -> tuple[list[Lane], dict[str, TierBelow], str]:
    """Those that are asked for, what carries blocks to them, and the name of the remote one. Raises ConfigError.

    Args:
        slots: of the one in the host's memory; `on_disk`: of that on a disk.
        files: see `Worker`.
    """
    lanes, movers, store = list[Lane](), dict[str, TierBelow](), ""
    if slots:
        lanes.append(Lane(Tier(slots), mirrors=True))
        movers["host"] = open_host_tier(cache, slots)
    if options.disk_cache is not None:
        below = open_disk_tier(cache, options.disk_cache, on_disk, files, options.layout.rounding)
        if below is not None:
            lanes.append(Lane(below.tier, below.block_seconds))
            movers["disk"] = below.mover
    if options.remote_cache is not None:
        from penstock.engine.remote_tier import open_remote_tier

        remote = open_remote_tier(cache, options.remote_cache, options.layout.rounding)
        lanes.append(Lane(SharedTier(), remote.block_seconds))
        movers["remote"], store = remote.mover, remote.name
    return lanes, movers, store


def _start_ranks(
    options: EngineOptions, device: torch.device, open_pool: OpenPool, peers: WeightManager | None
) -> RankProcesses | None:
    """All but this one, which load their shards meanwhile; None where there are no others. Raises ConfigError."""
    layout, size = options.layout, options.layout.group_size
    if size == 1 and not layout.meets:
        return None
    field, count = (PIPELINE, layout.pipeline) if layout.pipeline > 1 else (TENSOR, layout.tensor)
    if layout.meets:
        field, count = DATA, layout.data
        _check_groups(options)
    what = f"{field}: {count}"
    if device.type == "cuda":
        if options.helper_kv_memory is not None:
            why = "allowed is nothing on a CUDA device"
            raise ConfigError(f"{HELPER_KV}: {options.helper_kv_memory}, {why}", HELPER_KV)
        if options.host_cache_memory is not None:
            raise ConfigError(f"host-cache-memory with {what} is not supported yet", "host-cache-memory")
    if options.kv_address_mode == "contiguous":
        raise ConfigError(f"{what} with kv-address-mode contiguous is not supported", "kv-address-mode")
    if (reason := native.missing()) is not None:
        raise ConfigError(f"{what} needs the kernels, {reason}", field)
    from penstock.engine.executor.groups import Groups
    from penstock.engine.executor.processes import RankProcesses

    groups = Groups(options) if layout.meets else None
    threads = max(1, torch.get_num_threads() // size)
    native.set_threads(threads)
    return RankProcesses(options, device, threads, peers, groups)


def _check_groups(options: EngineOptions) -> None:
    """Raise ConfigError for what cannot be where steps are computed together."""
    what = f"{DATA}: {options.data_parallel_size} with {EXPERTS}"
    if options.data_parallel_address is None:
        raise ConfigError(f"{what}: a data-parallel-address is needed, at which the groups meet", DATA)
    if not 0 <= options.data_parallel_rank < options.data_parallel_size:
        allowed = f"allowed is 0 to {options.data_parallel_size - 1}"
        raise ConfigError(f"data-parallel-rank: {options.data_parallel_rank}, {allowed}", "data-parallel-rank")


def _disk_blocks(options: EngineOptions, block_bytes: int) -> int:
    """KV blocks, of so many bytes on all ranks, of the tier on disk; 0 where none is asked for. Raises ConfigError."""
    asked = SIZE if options.disk_cache_size is None else options.disk_cache_size
    size = None if options.disk_cache is None else asked
    return tier_blocks(size, block_bytes, prefix_cache=options.prefix_cache, option=SIZE_OPTION)


def _on_one_device(memory: int, options: EngineOptions, device: torch.device) -> int:
    """Of so many bytes of all ranks; those of a CPU have one memory."""
    return memory if device.type == "cpu" else memory // options.layout.group_size


def _block_pool(pool: KVPool | None, num_blocks: int, prefix_cache: bool, *, windowed: bool) -> BlockPool:
    """A block pool with the blocks inherited from this engine's previous incarnation, if any."""
    if pool is None:
        return BlockPool(range(num_blocks), windowed=windowed)
    blocks = BlockPool([*(record.block for record in pool.inherited), *pool.blocks], pool.client, windowed=windowed)
    if prefix_cache:
        blocks.restore(Published(r.block, r.key, r.parent) for r in pool.inherited)
    return blocks


def shape_of(model: Decoder) -> ModelShape:
    """From which its steps are predicted."""
    config = model.config
    shape = ModelShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        tied=config.tie_embeddings,
        bytes_per_value=model.dtype.itemsize,
        windows=config.windows,
        vision=None if config.vision is None else _tower(config.vision, config.hidden_size, model.dtype.itemsize),
    )
    if not model.quantised:
        return shape
    own, count = model.model.layers, config.num_layers / len(model.model.layers)
    layers = sum(part.weight_bytes for part in own.modules() if isinstance(part, Linear)) * model.shard.size * count
    shape = replace(shape, layer_bits=8 * layers / shape.layer_params)
    if not model.shard.is_last:  # a head is rarely quantised
        return shape
    head = model.head.weight_bytes / model.head.weight.shape[0] / shape.hidden
    return replace(shape, head_bits=8 * head)


def _tower(config: VisionConfig, width: int, itemsize: int) -> TowerShape:
    """A tower whose MLPs have no gate counts as one with gates and as many weights; one that sees tiles has windows of
    their size."""
    tiling, side = config.tiling, config.merge * config.window
    whole = config.num_layers if not side else len(config.whole_layers)
    return TowerShape(
        layers=config.num_layers,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size if tiling is None else config.intermediate_size * 2 // 3,
        patch_values=3 * config.frames * config.patch_size**2,
        merge=config.merge,
        window=side * side if tiling is None else tiling.per_tile,
        full_layers=whole if tiling is None else 0,
        width=width,
        bytes_per_value=itemsize,
    )
