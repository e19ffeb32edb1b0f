"""An engine of a modelled device: real scheduling, blocks and wire; digests for KV, and steps as long as they would be.

It computes `core.digest` over the digests in the blocks, so a wrong block changes the text. A step's duration is that
of `sched.steptime`, with seeded noise; the runner sleeps for the rest of it. No torch here: such a process starts in
well under a second.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from penstock.core import digest
from penstock.core.clock import Clock
from penstock.core.errors import ConfigError
from penstock.core.hf_config import text_config
from penstock.core.layout import KV_DTYPES, KVLayout, windows_of
from penstock.core.plan import BLOCK_TOKENS, POOLED_ONE, SequenceStep, StepPlan, StepResult, verified
from penstock.core.request import TokenLogprobs
from penstock.core.stop import Stop
from penstock.engine.digests import DigestArithmetic
from penstock.engine.executor import InlineExecutor, MaskCosts
from penstock.engine.loop import Engine, TierBelow
from penstock.engine.modelled_tier import open_modelled_store, open_modelled_tier
from penstock.engine.mover import PIECE
from penstock.engine.poison import Poison
from penstock.engine.remote_tier import check_remote_tier
from penstock.kv.groups import WHOLE, Windows, longest_sequence
from penstock.kv.keys import TAIL_INTERVAL, root_key
from penstock.kv.pool import BlockPool, Published
from penstock.kv.shared_tier import SharedTier
from penstock.kv.tier import Tier
from penstock.sched.local import Limits, Scheduler, make_local_policy
from penstock.sched.local.lane import Lane
from penstock.sched.local.limits import (
    DISK_GBPS,
    LEAST_CHUNK,
    MEMORY_SHARE,
    REMOTE_GBPS,
    STOPS_IN,
    Sizes,
    fitting_blocks,
    sized,
    tier_bandwidth,
    tier_blocks,
)
from penstock.sched.local.offload import Offload
from penstock.sched.local.speculation import make_speculation
from penstock.sched.steptime import DEVICES, GEOMETRIES, DeviceModel, ModelShape, StepTime, read_shape
from penstock.transfer.memory import PoolMemory
from penstock.transfer.pool import KVPool, OpenPool, ledger_of, memfd_pool

log = logging.getLogger("penstock.engine")
PREFIX = "modelled:"
BLOCK_BYTES = 4096  # a page, of which the digests take an eighth
LATE_SHARE = 0.05  # of modelled time; beyond it a warning is logged
REPORT_EVERY = 30.0  # modelled seconds between two looks at it
DISK_PIECE_BYTES = 32 << 20  # of KV on its way to the disk, after which loads may come first


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledOptions:
    """Options of a modelled device's engine; None leaves the choice to the engine.

    Attributes:
        model: a Hugging Face folder, of which only config.json, generation_config.json and tokenizer.json are read.
        device: "modelled:" and a name in `sched.steptime.DEVICES`.
        geometry: the model whose times are modelled, a name in `sched.steptime.GEOMETRIES`; None is `model`'s own.
        slowdown: factor on all times, at least 1: for a host that cannot keep up with so many devices.
        noise: standard deviation of a step's time, relative to it.
        seed: of the noise.
        max_model_len, max_num_seqs, max_num_batched_tokens, step_time_limit_ms: see `EngineOptions`; the limit is in
            the device's own time, before the slowdown, and by default LIMIT_MS (sched/local/limits.py).
        kv_cache_dtype: see `EngineOptions`; what the modelled device stores.
        kv_blocks, kv_cache_memory: at most one of them: blocks, or bytes of the modelled device.
        host_cache_memory: bytes of a tier of copies in the modelled device's host; None is no such tier.
        disk_cache_size: the same of a modelled disk, empty at each start.
        remote_cache: URL of a store for a tier that engines share (transfer/stores.py); it has digests in the place of
            KV, and sizes in the URL are of those. None is no such tier.
        disk_cache_gbps, remote_cache_gbps: gigabits of KV per second there, and back.
        prefix_cache, tail_key_interval: see `EngineOptions`.
        scheduling_policy: a name in `sched.local.LOCAL_POLICIES`.
        speculative_config: see `EngineOptions`.
        poison: TOKEN:HOW, for drills; see `engine.poison`.
    """

    model: str
    device: str = "modelled:h200"
    geometry: str | None = None
    slowdown: float = 1.0
    noise: float = 0.0
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    step_time_limit_ms: float | None = None
    kv_cache_dtype: str = "auto"
    kv_blocks: int | None = None
    kv_cache_memory: int | None = None
    host_cache_memory: int | None = None
    disk_cache_size: int | None = None
    remote_cache: str | None = None
    disk_cache_gbps: float = DISK_GBPS
    remote_cache_gbps: float = REMOTE_GBPS
    prefix_cache: bool = True
    tail_key_interval: int = TAIL_INTERVAL
    scheduling_policy: str = "slack"
    speculative_config: str = "auto"
    poison: str | None = None


@dataclass(frozen=True, slots=True)
class BuiltModelled:
    """See `engine.build.Built`.

    Attributes:
        device_model: with the slowdown.
    """

    engine: Engine
    runner: PacedRunner
    layout: KVLayout
    shape: ModelShape
    device_model: DeviceModel
    pool: KVPool
    store: str
    memory: None = None  # it has no weights, and its KV is of a few bytes a block

    def close(self) -> None:
        """Release the KV memory; the engine cannot be used afterwards."""
        self.engine.close()
        self.runner.close()
        self.pool.close()


def build_modelled(options: ModelledOptions, clock: Clock, open_pool: OpenPool = memfd_pool) -> BuiltModelled:
    """Raises ConfigError on an option or a folder that cannot be served."""
    _check(options)
    device, directory = _device(options.device), Path(options.model)
    config = _read_json(directory / "config.json")
    shape = _shape(options.geometry, config).storing(options.kv_cache_dtype)
    times = StepTime(device, shape)
    sizes, model_len = _size(options, device, shape, _positive(text_config(config), "max_position_embeddings"))
    slots = _slots(options, shape.block_bytes)
    windows = windows_of(shape.kv_groups)
    layout = KVLayout(
        model=_identity(config, replace(shape, kv_dtype=None)),
        order="digest",
        dtype="uint64",
        groups=shape.kv_groups,
        block_bytes=BLOCK_BYTES,
    )
    vocab_size = _positive(text_config(config), "vocab_size")
    token_ids = ordinary_ids(directory, vocab_size)
    pool = open_pool(layout, sizes.num_blocks)
    runner = PacedRunner(
        pool.memory,
        times,
        clock,
        device=options.device,
        vocab_size=vocab_size,
        token_ids=token_ids,
        positions=model_len,
        windows=windows,
        slowdown=options.slowdown,
        noise=options.noise,
        rng=random.Random(options.seed),
        poison=None if options.poison is None else Poison.read(options.poison),
    )
    limits = Limits(
        token_budget=sizes.token_budget,
        max_sequences=options.max_num_seqs,
        max_model_len=model_len,
        searches=False,
    )
    blocks = BlockPool([*pool.blocks, *(r.block for r in pool.inherited)], pool.client)
    if options.prefix_cache:
        blocks.restore(Published(r.block, r.key, r.parent) for r in pool.inherited)
    root = root_key(layout.model, layout.dtype, layout.kv_dtype)
    device_model = device.slowed(options.slowdown)
    lanes, movers, store = _open_tiers(options, pool.memory, layout, slots, StepTime(device_model, shape))
    limit = sizes.limit.slowed(options.slowdown)
    policy = make_local_policy(options.scheduling_policy, StepTime(device_model, shape), limit)
    scheduler = Scheduler(
        limits,
        blocks,
        root=root,
        prefix_cache=options.prefix_cache,
        policy=policy,
        offload=Offload(blocks, lanes) if lanes else None,
        speculation=make_speculation(options.speculative_config),
        windows=windows,
        tail_interval=options.tail_key_interval,
    )
    log.info(
        "%s on %s: %d blocks of KV cache, %d of them restored, sequences up to %d tokens, steps up to %d tokens, "
        "slowed down %g times",
        options.geometry or "the model's own geometry",
        options.device,
        blocks.num_blocks,
        blocks.cached,
        model_len,
        sizes.token_budget,
        options.slowdown,
    )
    engine = Engine(scheduler, InlineExecutor(runner, clock, beside=True), clock, ledger_of(pool), movers=movers)
    return BuiltModelled(engine, runner, layout, shape, device_model, pool, store)


def _slots(options: ModelledOptions, block_bytes: int) -> dict[str, int]:
    """Tier with slots -> how many. Raises ConfigError, also for one without them."""
    if options.remote_cache is not None:
        check_remote_tier(options.remote_cache, "modelled", 1, prefix_cache=options.prefix_cache)
    sizes = {
        "host": ("host-cache-memory", options.host_cache_memory),
        "disk": ("disk-cache-size", options.disk_cache_size),
    }
    return {
        tier: blocks
        for tier, (option, size) in sizes.items()
        if (blocks := tier_blocks(size, block_bytes, prefix_cache=options.prefix_cache, option=option))
    }


def _open_tiers(
    options: ModelledOptions, memory: PoolMemory, layout: KVLayout, slots: Mapping[str, int], times: StepTime
) -> tuple[list[Lane], dict[str, TierBelow], str]:
    """Those that are asked for, what carries blocks to them, and the name of the remote one. Raises ConfigError.

    Args:
        slots: of tiers in the host.
        times: with the slowdown.
    """
    block_bytes, lanes, movers = times.shape.block_bytes, list[Lane](), dict[str, TierBelow]()
    if number := slots.get("host"):
        seconds = times.load_blocks_ms(1) / 1e3
        lanes.append(Lane(Tier(number), mirrors=True))
        movers["host"] = open_modelled_tier(
            memory, number, seconds=seconds, block_bytes=block_bytes, where="in the host's memory"
        )
    if number := slots.get("disk"):
        seconds = block_bytes / tier_bandwidth(options.disk_cache_gbps, options.slowdown)
        piece = max(1, min(PIECE, DISK_PIECE_BYTES // block_bytes))
        lanes.append(Lane(Tier(number, "disk"), seconds))
        movers["disk"] = open_modelled_tier(
            memory, number, seconds=seconds, block_bytes=block_bytes, where="on a disk", piece=piece
        )
    if options.remote_cache is None:
        return lanes, movers, ""
    seconds = block_bytes / tier_bandwidth(options.remote_cache_gbps, options.slowdown)
    remote = open_modelled_store(memory, options.remote_cache, layout, seconds=seconds, block_bytes=block_bytes)
    lanes.append(Lane(SharedTier(), seconds))
    movers["remote"] = remote.mover
    return lanes, movers, remote.name


# --- running


@dataclass(slots=True)
class StepPacer:
    """Whether steps took as long as they should, in seconds since the start.

    Attributes:
        modelled: what all steps should have taken.
        late_steps, late: steps whose arithmetic alone took longer, and by how much together.
        overslept: total delay of wake-ups.
    """

    steps: int = 0
    modelled: float = 0.0
    late_steps: int = 0
    late: float = 0.0
    overslept: float = 0.0

    @property
    def error(self) -> float:
        """Time beyond what was modelled, as a share of it."""
        return (self.late + self.overslept) / self.modelled if self.modelled else 0.0


class PacedRunner:
    """Runs plans in the time that a device would take. All it computes with are the plan and the digests in the pool.

    Of how a token is to be sampled, only the seed and whether the draw is greedy matter; penalties and the like would
    need logits, and there are none. Every token's probability is reported as 1.

    Args:
        memory: the pool; each block begins with BLOCK_TOKENS digests of 8 bytes.
        times: what a step takes, in ms.
        token_ids: that may be sampled.
        positions: the longest sequence.
        windows: of the model's groups of layers.
        slowdown, noise, rng: see `ModelledOptions`.
        sleep: lets so many seconds pass.
        poison: see `ModelledOptions`.
    """

    def __init__(
        self,
        memory: PoolMemory,
        times: StepTime,
        clock: Clock,
        *,
        device: str,
        vocab_size: int,
        token_ids: range,
        positions: int,
        windows: Windows = WHOLE,
        slowdown: float = 1.0,
        noise: float = 0.0,
        rng: random.Random,
        sleep: Callable[[float], None] = time.sleep,
        poison: Poison | None = None,
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.token_ids = token_ids
        self.pacer = StepPacer()
        self.mask_costs = MaskCosts()  # there are no logits to mask
        self._reported = StepPacer()
        self._arithmetic = DigestArithmetic(positions, vocab_size, windows)
        words = np.frombuffer(memory.buffer, dtype=np.uint64).reshape(memory.num_blocks, -1)
        self._digests = words[:, :BLOCK_TOKENS]
        self._times, self._clock, self._sleep = times, clock, sleep
        self._slowdown, self._noise, self._rng = slowdown, noise, rng
        self._poison = poison
        self._last_ids: set[str] = set()
        self._ended = clock.now()  # the last step

    def prepare(self, plan: StepPlan) -> None:
        """Nothing to prepare."""

    def run(self, plan: StepPlan, stop: Stop | None = None) -> StepResult:
        begin = self._begin(plan)
        if self._poison is not None:
            self._poison.taste(plan)
        if plan.fresh_blocks:
            self._digests[list(plan.fresh_blocks)] = 0
        for source, target, tokens in plan.copies:
            self._digests[target, :tokens] = self._digests[source, :tokens]
            self._digests[target, tokens:] = 0
        contexts = iter(self._arithmetic.run(plan.sequences, self._digests) if plan.sequences else [])
        sampled, drawn, pooled = [s for s in plan.sequences if s.sample], list[int](), dict[str, list[float]]()
        for s in plan.sequences:
            end, seed = s.start + len(s.tokens), None if s.params.greedy else s.seed
            for position in range(end - s.sample + 1, end + 1):
                drawn.append(digest.sample(next(contexts), position, self.token_ids, seed))
            if s.pool:
                pooled[s.request_id] = _pooled(s, next(contexts))
        runs = verified(sampled, drawn)
        result = StepResult(
            runs,
            [
                _certain(s.params.logprobs, run, s.params.logprob_token_ids or ())
                for s, run in zip(sampled, runs, strict=True)
            ],
            {s.request_id: _certain(s.params.prompt_logprobs, s.targets) or [] for s in plan.sequences if s.targets},
            pooled=pooled,
            encoding=self._encoding(plan) if plan.encodes else {},
        )
        if self._pace(begin, self._duration(plan), stop):
            return result
        return StepResult([], [], interrupted=True)

    @property
    def embedding_size(self) -> int:
        return digest.EMBEDDING

    @property
    def generates(self) -> bool:
        return True

    def counts(self) -> dict[str, int]:
        """Its pacer, for inspection."""
        pacer = self.pacer
        return {
            "modelled_steps": pacer.steps,
            "modelled_ms": round(pacer.modelled * 1e3),
            "late_steps": pacer.late_steps,
            "late_ms": round(pacer.late * 1e3),
            "overslept_ms": round(pacer.overslept * 1e3),
        }

    def check(self) -> None:
        """Nothing to check."""

    def close(self) -> None:
        """Release the memory; the runner cannot be used afterwards."""
        del self._digests

    def _begin(self, plan: StepPlan) -> float:
        """When the step began. One that goes on with what the last one did began right after that, as far as what the
        engine did in between is part of the overhead that every step has on the device too."""
        now, ids = self._clock.now(), {s.request_id for s in plan.sequences}
        goes_on, self._last_ids = not ids.isdisjoint(self._last_ids), ids
        overhead = self._times.device.overhead_ms / 1e3 * self._slowdown
        return max(self._ended, now - overhead) if goes_on else now

    def _duration(self, plan: StepPlan) -> float:
        """Seconds that the step is to take."""
        ms = self._times.step_ms(*plan.work) + self._times.copy_ms(plan.copied_tokens)
        if plan.encodes and self._times.shape.vision is not None:
            ms += self._times.encode_ms([encode.span.length for encode in plan.encodes if not encode.made])
        # log-normal with mean 1: a step is never negative and now and then much longer, as real ones are
        noise = self._rng.lognormvariate(-(self._noise**2) / 2, self._noise) if self._noise else 1.0
        return ms / 1e3 * self._slowdown * noise

    def _encoding(self, plan: StepPlan) -> dict[bytes, float]:
        """See `StepResult`: of what they take together each has its share."""
        looked = {encode.span.digest: encode.span.length for encode in plan.encodes if not encode.made}
        if not looked or self._times.shape.vision is None:
            return {}
        each = self._times.encode_ms([*looked.values()]) / 1e3 * self._slowdown / sum(looked.values())
        return {digest: each * tokens for digest, tokens in looked.items()}

    def _pace(self, begin: float, duration: float, stop: Stop | None = None) -> bool:
        """Returns `duration` seconds after `begin`, or at once when that has passed, and keeps account. False when it
        was stopped before."""
        pacer = self.pacer
        left = begin + duration - self._clock.now()
        if left > 0 and stop is not None:
            while (rest := begin + duration - self._clock.now()) > STOPS_IN * self._slowdown and not stop:
                self._sleep(STOPS_IN * self._slowdown)
            if stop:
                self._ended = self._clock.now()
                return False
            left = max(rest, 1e-9)  # in time, even if it overslept
        pacer.steps += 1
        pacer.modelled += duration
        if left > 0:
            self._sleep(left)
            pacer.overslept += max(0.0, self._clock.now() - begin - duration)
        else:
            pacer.late_steps += 1
            pacer.late -= left
        self._ended = self._clock.now()
        if pacer.modelled - self._reported.modelled >= REPORT_EVERY:
            self._report()
        return True

    def _report(self) -> None:
        """Warn when steps since the last check took much longer than modelled."""
        new, old = self.pacer, self._reported
        modelled = new.modelled - old.modelled
        late, overslept = new.late - old.late, new.overslept - old.overslept
        if late + overslept > LATE_SHARE * modelled:
            log.warning(
                "this host cannot keep the pace: of %.1f s, steps were %.2f s late (%d of %d) and woken %.2f s late; "
                "a greater slowdown would be honest",
                modelled,
                late,
                new.late_steps - old.late_steps,
                new.steps - old.steps,
                overslept,
            )
        self._reported = StepPacer(new.steps, new.modelled, new.late_steps, new.late, new.overslept)


def _certain(asked: int | None, tokens: Sequence[int], named: Sequence[int] = ()) -> list[TokenLogprobs] | None:
    """
    Args:
        named: tokens that are reported, too.
    """
    if asked is None:
        return None
    return [
        TokenLogprobs(
            chosen=0.0,
            rank=1,
            top=[*([(token, 0.0)] if asked or named else []), *((n, -math.inf) for n in named if n != token)],
        )
        for token in tokens
    ]


def _pooled(step: SequenceStep, context: int) -> list[float]:
    """What a mean is of comes with the last step of the prompt."""
    end = step.start + len(step.tokens)
    values = digest.embedding(context)
    if step.pool == "last":
        return values
    return [round(x * POOLED_ONE) * end if end == len(step.prompt) else 0 for x in values]


# --- reading what was asked for


def ordinary_ids(directory: Path, vocab_size: int) -> range:
    """The longest run of token ids that are plain text: no added tokens, nothing that ends an output, no gaps.

    Raises ConfigError when the folder has no tokenizer.json, or not of the usual form.
    """
    file = directory / "tokenizer.json"
    tokenizer = _read_json(file)
    try:
        vocabulary = tokenizer["model"]["vocab"]
        ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
        ids -= {added["id"] for added in tokenizer.get("added_tokens", ())}
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file}: its vocabulary cannot be read ({error!r})", "model") from None
    generation = directory / "generation_config.json"
    for source in (directory / "config.json", *([generation] if generation.is_file() else [])):
        ends = _read_json(source).get("eos_token_id")
        ids -= set(ends) if isinstance(ends, list) else {ends}
    best = run = range(0)
    for token in sorted(i for i in ids if 0 <= i < vocab_size):
        run = range(run.start if token == run.stop else token, token + 1)
        best = max(best, run, key=len)
    if not best:
        raise ConfigError(f"{file}: it has no ordinary token below {vocab_size}", "model")
    return best


def _check(options: ModelledOptions) -> None:
    """Ranges, in the flags' names."""
    ranges = {
        "max-num-seqs": (options.max_num_seqs, 1, 65536),
        "step-time-limit-ms": (options.step_time_limit_ms, 1e-3, 1e6),
        "slowdown": (options.slowdown, 1.0, 1e6),
        "noise": (options.noise, 0.0, 1.0),
        "tail-key-interval": (options.tail_key_interval, 0, BLOCK_TOKENS - 1),
        "kv-blocks": (1 if options.kv_blocks is None else options.kv_blocks, 1, 1 << 28),
    }
    for name, (value, low, high) in ranges.items():
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name}: {value}, allowed is {low:g} to {high:g}", name)
    speculation = make_speculation(options.speculative_config)
    if speculation is not None and speculation.head is not None:
        raise ConfigError(
            f"speculative-config: method {speculation.head}, a modelled device has no draft head, "
            "allowed are ngram and off",
            "speculative-config",
        )
    if options.kv_cache_dtype not in KV_DTYPES:
        allowed = ", ".join(KV_DTYPES)
        raise ConfigError(f"kv-cache-dtype: {options.kv_cache_dtype!r}, allowed are {allowed}", "kv-cache-dtype")
    if options.kv_blocks is not None and options.kv_cache_memory is not None:
        raise ConfigError("kv-blocks: given beside kv-cache-memory, only one of them can hold", "kv-blocks")


def _device(name: str) -> DeviceModel:
    device = DEVICES.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if device is None:
        allowed = ", ".join(PREFIX + known for known in DEVICES)
        raise ConfigError(f"device: {name!r}, modelled devices are {allowed}", "device")
    return device


def _shape(name: str | None, config: dict[str, Any]) -> ModelShape:
    if name is None:
        return read_shape(config)
    if name not in GEOMETRIES:
        raise ConfigError(f"geometry: {name!r}, allowed are {', '.join(GEOMETRIES)}", "geometry")
    return GEOMETRIES[name]


def _size(options: ModelledOptions, device: DeviceModel, shape: ModelShape, most: int) -> tuple[Sizes, int]:
    """(blocks and tokens of a step, longest sequence served).

    Args:
        most: tokens of the longest sequence that the model allows.
    """
    asked, kv_blocks = options.max_model_len, options.kv_blocks
    if asked is not None and not 2 <= asked <= most:
        raise ConfigError(f"max-model-len: {asked}, this checkpoint allows 2 to {most}", "max-model-len")
    fitting = fitting_blocks(device, shape)
    if options.kv_cache_memory is not None:
        kv_blocks = options.kv_cache_memory // shape.block_bytes
    if not fitting or (options.kv_cache_memory is not None and kv_blocks is not None and kv_blocks > fitting):
        free = max(0.0, device.memory * MEMORY_SHARE - shape.weight_bytes)
        raise ConfigError(
            f"device: {options.device} has {device.memory / 1e9:.0f} GB, of which {free / 1e9:.1f} GB are left "
            f"for the KV cache beside {shape.weight_bytes / 1e9:.1f} GB of weights",
            "kv-cache-memory" if options.kv_cache_memory else "device",
        )
    blocks = fitting if kv_blocks is None else kv_blocks
    model_len = asked or max(2, longest_sequence(windows_of(shape.kv_groups), LEAST_CHUNK, blocks, most))
    try:
        sizes = sized(
            device,
            shape,
            max_model_len=model_len,
            max_num_seqs=options.max_num_seqs,
            kv_blocks=kv_blocks,
            max_num_batched_tokens=options.max_num_batched_tokens,
            step_time_limit_ms=options.step_time_limit_ms,
        )
    except ConfigError as error:
        raise ConfigError(f"{error.field}: {error}", error.field) from None
    return sizes, model_len


def _identity(config: dict[str, Any], shape: ModelShape) -> str:
    """Names the modelled model, wherever its folder lies."""
    text = f"{json.dumps(config, sort_keys=True)} {shape}"
    return blake2b(text.encode(), digest_size=16, person=b"penstock.model").hexdigest()


def _positive(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json: {name} is {value!r}, a positive whole number is needed", "model")
    return value


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read ({error})", "model") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: must hold a JSON object", "model")
    return value
