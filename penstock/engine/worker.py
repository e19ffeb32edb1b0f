"""A worker: a device, its shard of a model, its part of the KV cache, and the runner that computes with them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from penstock.core.errors import ConfigError
from penstock.core.layout import KVLayout
from penstock.core.memory import Part, give_back_memory
from penstock.core.plan import SequenceStep, StepPlan
from penstock.core.sampling import SamplingParams
from penstock.engine.cache import ContiguousCache, KVCache, make_layout
from penstock.engine.memory import free_bytes, mapping_budget
from penstock.engine.options import EngineOptions, dtype_of, engine_device, rank_device
from penstock.engine.runner import Runner
from penstock.nn.graph import Mode, obstacle
from penstock.nn.identity import file_times, identity
from penstock.nn.image import DeviceImage
from penstock.nn.linear import WHOLE
from penstock.nn.loader import Loaded, load, read_architecture
from penstock.nn.models.decoder import Decoder
from penstock.nn.ops.attention import reads_in_place
from penstock.nn.reading import changed
from penstock.nn.rope import longest
from penstock.nn.weight_cache import FILES, WeightCache
from penstock.obs.progress import Report
from penstock.sched.local.limits import StepBudget
from penstock.sched.local.policy.base import StepLimit
from penstock.sched.local.sequence import blocks_for
from penstock.sched.local.speculation import make_speculation
from penstock.text.grammar import Grammars
from penstock.transfer.pool import KVPool, OpenPool, SharedPool, anonymous_pool, memfd_pool

if TYPE_CHECKING:
    from penstock.engine.executor.exchanges import Exchanges
    from penstock.engine.experts import ExpertLoader
    from penstock.engine.weights import WeightManager

MOST_TOKENS = 8192  # in a step, however fast the device is


class Worker:
    """Loads a model, and then has a KV cache of the size that all workers have room for.

    Args:
        others: what it exchanges with the ranks that compute the model with it; None where it is alone.
        progress: of loading.
        peers: that weights may come from, and are given to; None without any.

    Attributes:
        loaded: where weights came from, the last time.
        layout: of a block: on a CPU, where ranks share one memory, of the whole of it; else of its own part.
        max_model_len: of a sequence, as far as the model decides it.
        budget: of a step's tokens.
        experts: moves them between ranks, where their load is kept even.

    Raises:
        ConfigError: a checkpoint or an option that cannot be served.
    """

    runner: Runner
    loaded: Loaded

    def __init__(
        self,
        options: EngineOptions,
        others: Exchanges | None = None,
        progress: Report | None = None,
        peers: WeightManager | None = None,
    ) -> None:
        device = engine_device(options)
        if others is not None:
            device = rank_device(options, device, others.world.rank)
        self.options, self._device, self._others = options, device, others
        self.shard = shard = WHOLE if others is None else others.shard
        self.before, self.after = (None, None) if others is None else (others.before, others.after)
        speculation = make_speculation(options.speculative_config)
        self._head = None if speculation is None else speculation.head
        self._drafts = 0 if speculation is None or self._head is None else speculation.most
        self._weights = WeightCache(files=FILES * options.layout.group_size) if options.weight_cache else None
        self._peers = peers
        if peers is not None:
            peers.place = device
        self._gone = False  # the weights, to be read again
        self._gave: tuple[str, Sequence[int]] | None = None  # of an image, whose weights the host has meanwhile
        if others is None and options.enable_expert_parallel:  # else the loader knows of it
            read_architecture(Path(options.model), options.layout)
        self.model = model = self._load(progress)
        mode = options.graph_mode
        if mode in ("partial", "full") and (reason := obstacle(model, cast(Mode, mode))) is not None:
            raise ConfigError(f"graph-mode: {mode!r} is not to be had, {reason}", "graph-mode")
        self.max_model_len = options.max_model_len or longest(model.config)
        self.limit = StepLimit.asked(options.step_time_limit_ms, cpu=device.type == "cpu")
        self.budget = _step_budget(options, self.max_model_len, self.limit)
        order = _chosen(options.kv_layout, "block")
        self._identity = identity(Path(options.model))
        self.files = file_times(Path(options.model))
        if self.files != self.loaded.files:  # blocks of the KV cache would be kept as of other weights
            raise changed(Path(options.model))
        variant = (self._identity, model.config.variant, self.loaded.quantised, self._head)
        name = "-".join(filter(None, variant))
        part = shard if device.type == "cuda" else WHOLE
        self.layout = make_layout(
            model.config,
            model.dtype,
            order,
            name,
            options.kv_cache_dtype,
            ranks=part.size,
            layers=part.layers(model.config.kept_layers),
        )
        if options.kv_address_mode == "contiguous" and len(self.layout.groups) > 1:
            raise ConfigError(
                "kv-address-mode: 'contiguous', for a model of which only some layers have a window allowed is table",
                "kv-address-mode",
            )
        self.pool: KVPool | None = None
        self.experts: ExpertLoader | None = None
        if options.enable_eplb:
            from penstock.engine.experts import ExpertLoader, expert_ranks  # with messages between ranks

            slots = expert_ranks(options, model.config).slots
            self.experts = ExpertLoader(Path(options.model), self.files, model, slots)

    def room(self) -> int:
        """Bytes that the KV cache may take by default: on a CPU all of it, else this rank's part."""
        model, options = self.model, self.options
        if model.device.type == "cuda":
            self.budget.found(self.budget.high, self._touch_memory(self.budget.high))
        return free_bytes(model.device, options.gpu_memory_utilization, len(model.model.layers))

    def open(self, num_blocks: int, max_model_len: int, open_pool: OpenPool = memfd_pool) -> None:
        """Make the KV cache.

        Args:
            open_pool: where its blocks come from; ranks of a CPU have the same.

        Raises:
            ConfigError: or a KV pool server that refuses.
            Unavailable: there is no KV pool server.
        """
        if isinstance(open_pool, SharedPool):
            open_pool = replace(open_pool, weights=f"{self.files} {self.options.layout.rounding}")
        cache, self.pool = _open_cache(self.options, self.model, self.layout, num_blocks, max_model_len, open_pool)
        grammars = Grammars(Path(self.options.model), self.model.config.vocab_size)
        self.runner = self._runner(cache, grammars)
        if self.experts is not None:
            self.runner.switch = self.experts.switch
        if self.options.helper_kv_memory and self._others is not None and self._others.groups is not None:
            from penstock.engine.helping import open_helpers  # with what groups share

            groups, places = self._others.groups, self._others.helpers()
            assert places is not None
            self.runner.helpers = open_helpers(places, groups.copies(groups.group), self.model, cache)
        self.runner.capture(self.options.max_num_seqs, max_model_len)

    def _runner(self, cache: KVCache, grammars: Grammars | None = None) -> Runner:
        options = self.options
        pipes = self.before, self.after
        return Runner(self.model, cache, options.graph_mode, grammars, *pipes, self._drafts)

    def _touch_memory(self, tokens: int) -> float:
        """Read a prompt of so many tokens, so that the memory to work in is known before the cache gets the rest.
        Returns the seconds that it takes once kernels are compiled."""
        layout, device = self.layout, self.model.device
        blocks = tuple(range(blocks_for(tokens) * len(layout.groups)))
        params = SamplingParams(temperature=0.0)
        plan = StepPlan((SequenceStep("warm-up", 0, [0] * tokens, blocks, 1, params, 0),), blocks)
        runner = self._runner(KVCache.on_device(layout, len(blocks), device))
        runner.run(plan)
        began = time.perf_counter()
        runner.run(plan)
        return time.perf_counter() - began

    def save_weights(self) -> None:
        """Have packed weights kept for the next start, in the background."""
        if self._weights is not None:
            self._weights.save_later()

    def sleep(self, level: int, blocks: Sequence[int] | None = None) -> None:
        """Give memory back: that of the KV cache, and that of weights, which go to the host's memory, where they are on
        a CPU anyway, or from level 2 on nowhere. No plan is run then until `wake_up`.

        Args:
            blocks: of the pool, in ascending order, whose memory nobody needs any more; None is all.
        """
        self.runner.cache.forget()
        self.runner.media.forget()
        if self.pool is not None:
            for first, count in _runs(range(self.pool.memory.num_blocks) if blocks is None else blocks):
                self.pool.memory.punch(first, count)
        if level == 1 and self._device.type == "cpu":
            return
        if self.experts is not None:
            self.experts.rest()
        hollow = self._hollow()
        self.runner.take(hollow)
        image, self.loaded = self.loaded.image, replace(self.loaded, image=None)
        if self._peers is not None:
            self._peers.give(None)
        if level > 1:
            self.model, self._gone = hollow, True
            self.loaded = replace(self.loaded, model=hollow)
        else:
            self._gave = None if image is None else (image.key, image.digests)
            self.model._apply(lambda place: place.cpu())
        del image  # a device's memory is free then
        give_back_memory()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def wake_up(self, parts: Sequence[Part]) -> None:
        """Take up the memory of these again, if it was given back.

        Raises:
            ConfigError: the checkpoint is not what it was, or cannot be read, or there is no room; what is not there
                then can be taken up later.
        """
        try:
            self._take_up(parts)
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"{self._device}: no room to wake up ({str(error).splitlines()[0]})") from None

    def _take_up(self, parts: Sequence[Part]) -> None:
        if "weights" in parts:
            if self._gone:
                path = Path(self.options.model)
                if (identity(path), file_times(path)) != (self._identity, self.files):
                    # prefix keys, and blocks from elsewhere, are those of the model that it was
                    raise ConfigError(f"{self.options.model}: the checkpoint is another one now, restart", "model")
                self.model = self._load()
                self._gone = False
                self.save_weights()
            elif self.model.device != self._device:
                self.model._apply(lambda place: place.to(self._device))
                self.model.bound_logits()
                self._give_again()
            if self.experts is not None:
                self.experts.resume(self.model)
            if self.runner.model is not self.model:
                self.runner.take(self.model)
        if "kv_cache" in parts:
            self.runner.cache.remember()

    def _load(self, progress: Report | None = None) -> Decoder:
        options = self.options
        self.loaded = load(
            Path(options.model),
            self._device,
            dtype_of(options.dtype),
            self._weights,
            self.shard,
            model_len=options.max_model_len,
            load_format=options.load_format,
            quantization=options.quantization,
            progress=progress,
            peers=self._peers,
            draft_head=self._head is not None,
        )
        if self._peers is not None:
            self._peers.is_current = partial(_has_files, Path(options.model), self.loaded.files)
            self._peers.give(self.loaded.image)
        return self.loaded.model

    def _give_again(self) -> None:
        """What a device has again."""
        if self._peers is None or self._gave is None:
            return
        (key, digests), self._gave = self._gave, None
        image = DeviceImage.of(key, self.model)
        image.digests = digests
        self.loaded = replace(self.loaded, image=image)
        self._peers.give(image)

    def _hollow(self) -> Decoder:
        """A model like this one without weights. Not this one without them: they may just be being written to disk."""
        with torch.device("meta"):
            hollow = type(self.model)(self.model.config, self.shard).to(self.model.dtype)
        hollow.headless = self.model.headless
        return hollow

    def close(self) -> None:
        """Release the KV memory; the worker cannot be used afterwards."""
        self.runner.cache.close()
        if self.pool is not None:
            self.pool.close()


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of neighbours among blocks that are in ascending order."""
    for _, run in groupby(enumerate(blocks), lambda place: place[1] - place[0]):
        neighbours = [block for _, block in run]
        yield neighbours[0], len(neighbours)


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
    table = _chosen(options.kv_address_mode, _faster_mode(model, layout)) == "table"
    if table and open_pool is memfd_pool and model.shard == WHOLE:
        open_pool = anonymous_pool
    pool = open_pool(layout, num_blocks)
    try:
        if table:
            return KVCache.over_pool(layout, pool.memory, model.shard), pool
        ranges = {"max_sequences": options.max_num_seqs, "range_blocks": blocks_for(model_len)}
        return ContiguousCache(layout, pool.memory, **ranges, budget=mapping_budget()), pool
    except BaseException:
        pool.close()
        raise


def _has_files(directory: Path, files: str) -> bool:
    """Whether a checkpoint's files are still those."""
    try:
        return file_times(directory) == files
    except ConfigError:
        return False


def _faster_mode(model: Decoder, layout: KVLayout) -> str:
    """Kernels that read blocks where they lie gain nothing by ranges, and prompts need not wait for mappings. Those of
    several groups of layers are in no range."""
    in_place = reads_in_place(model.device.type, model.dtype) or len(layout.groups) > 1
    return "table" if in_place else "contiguous"


def _chosen(option: str, auto: str) -> str:
    return auto if option == "auto" else option


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
