"""What an engine is built from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.core.device import QUANTIZATIONS
from penstock.core.errors import ConfigError
from penstock.core.layout import KV_DTYPES
from penstock.core.parallel import DATA, EXPERTS, PIPELINE, TENSOR, Layout
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.sizes import MEDIA_CACHE
from penstock.kv.keys import TAIL_INTERVAL
from penstock.nn.config import DTYPES
from penstock.nn.graph import MODES
from penstock.nn.reading import LOAD_FORMATS
from penstock.sched.parallel.rebalancing import make_eplb

EPLB, DBO, ENCODE_BESIDE = "enable-eplb", "enable-dbo", "encode-beside"
HELPER_KV = "helper-kv-memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """An engine's options; None leaves the choice to the engine.

    Attributes:
        model: a Hugging Face checkpoint folder.
        device: "cpu", "cuda", "cuda:1"; None takes CUDA where there is one. The first, where there are several ranks or
            data-parallel groups; the others have those behind it.
        dtype: "bfloat16", "float16" or "float32"; None or "auto" takes the checkpoint's.
        kv_cache_dtype: that K and V are stored in, a name in `core.layout.KV_DTYPES`; "auto" is `dtype`.
        max_model_len: prompt and output tokens of one sequence; None takes the checkpoint's, or what fits.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens in one step; None finds out how many stay within `step_time_limit_ms`.
        step_time_limit_ms: of a step with prompts; None is the default (`StepLimit.asked`).
        kv_cache_memory: bytes of KV cache.
        host_cache_memory: bytes of a tier of copies in the host's memory, below a CUDA device; None is no such tier.
        disk_cache: a folder for a tier of copies on disk; None is no such tier.
        disk_cache_size: bytes of it; None is the default (engine/disk_tier.py).
        remote_cache: URL of a store for a tier that engines share (transfer/stores.py); None is no such tier.
        media_cache_memory: bytes of embeddings of images that are kept.
        encode_beside: "on" or "off", whether images are looked at beside steps, which then do not wait for it; "auto"
            is `encodes_beside` (engine/build.py).
        gpu_memory_utilization: on CUDA, the share of the device's memory that may be used.
        prefix_cache: whether computed prefixes are found again.
        tail_key_interval: tokens between the places inside a block at which a match may end; 0 is only at its end.
        kv_address_mode: "contiguous" or "table" (engine/cache.py); "auto" is what measured faster: on a CPU, table with
            our own kernels and contiguous with torch's; table on CUDA, which has nothing else yet.
        kv_layout: "block" or "token", how a block is laid out (core/layout.py); "auto" is "block", which measured
            faster in either mode.
        scheduling_policy: a name in `sched.local.LOCAL_POLICIES`.
        speculative_config: see `sched.local.speculation.make_speculation`.
        graph_mode: "eager", "partial", "full" or "auto": how a step is computed (nn/graph.py).
        async_scheduling: whether the next step is scheduled while one runs (sched/local/steps.py).
        isa: the instruction set whose kernels a CPU computes with (nn/native/isa.py); None takes the best that it has.
        tensor_parallel_size: ranks that every layer is spread over: processes on a CPU, or devices.
        pipeline_parallel_size: stages of so many ranks, each of which has some of the layers.
        data_parallel_size: groups of so many ranks, each an engine of its own, among which experts are spread too, if
            they are; otherwise each group is as if it were alone.
        data_parallel_rank: which of them this is.
        data_parallel_address: path of a socket at which they meet.
        enable_expert_parallel: whether experts are spread over ranks, whole ones.
        enable_eplb: whether experts move between these such that they have equally much to do.
        eplb_config: how, as `sched.parallel.rebalancing.make_eplb` has it.
        one_device: for tests: all ranks are on one CUDA device, and NCCL takes each for a host of its own.
        helper_kv_memory: bytes for copies of other data-parallel groups' KV, over which this one attends for them while
            it would wait; None is no help.
        enable_dbo: whether steps are two micro-batches where that hides what these exchange.
        load_format: "mmap", "sequential" or "auto": how a checkpoint's files are read (nn/reading.py).
        quantization: what a plain checkpoint is quantised to, a name in `core.device.QUANTIZATIONS`; "auto" leaves it
            as it is.
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
    disk_cache: str | None = None
    disk_cache_size: int | None = None
    remote_cache: str | None = None
    media_cache_memory: int = MEDIA_CACHE
    encode_beside: str = "auto"
    gpu_memory_utilization: float = 0.9
    prefix_cache: bool = True
    tail_key_interval: int = TAIL_INTERVAL
    kv_address_mode: str = "auto"
    kv_layout: str = "auto"
    scheduling_policy: str = "slack"
    speculative_config: str = "auto"
    graph_mode: str = "auto"
    async_scheduling: bool = True
    load_format: str = "auto"
    weight_cache: bool = True
    isa: str | None = None
    quantization: str = "auto"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_address: str | None = None
    enable_expert_parallel: bool = False
    enable_eplb: bool = False
    eplb_config: str = "{}"
    enable_dbo: bool = False
    one_device: bool = False
    helper_kv_memory: int | None = None

    @property
    def layout(self) -> Layout:
        """Of the ranks of this engine. Raises ConfigError."""
        return Layout(
            tensor=self.tensor_parallel_size,
            pipeline=self.pipeline_parallel_size,
            data=self.data_parallel_size,
            experts=self.enable_expert_parallel,
        )


def check_options(options: EngineOptions) -> None:
    """Ranges, in the flags' names. Raises ConfigError."""
    for name, asked in ((EPLB, options.enable_eplb), (DBO, options.enable_dbo)):
        if asked and options.layout.expert_ranks == 1:  # `layout` has ranges of its own
            raise ConfigError(f"{name}: true, allowed is false where {EXPERTS} spreads no experts over ranks", name)
    if options.helper_kv_memory is not None and not options.layout.meets:
        why = f"allowed is none where {DATA} and {EXPERTS} have no groups that meet"
        raise ConfigError(f"{HELPER_KV}: {options.helper_kv_memory}, {why}", HELPER_KV)
    make_eplb(options.eplb_config)
    ranges = {
        "max-num-seqs": (options.max_num_seqs, 1, 65536),
        "step-time-limit-ms": (options.step_time_limit_ms, 1e-3, 1e6),
        "tail-key-interval": (options.tail_key_interval, 0, BLOCK_TOKENS - 1),
        "gpu-memory-utilization": (options.gpu_memory_utilization, 0.01, 1.0),
    }
    for name, (value, low, high) in ranges.items():
        if value is not None and not low <= value <= high:
            raise ConfigError(f"{name}: {value}, allowed is {low:g} to {high:g}", name)
    choices = {
        "kv-address-mode": (options.kv_address_mode, ("auto", "contiguous", "table")),
        "kv-cache-dtype": (options.kv_cache_dtype, tuple(KV_DTYPES)),
        ENCODE_BESIDE: (options.encode_beside, ("auto", "on", "off")),
        "kv-layout": (options.kv_layout, ("auto", "block", "token")),
        "graph-mode": (options.graph_mode, MODES),
        "quantization": (options.quantization, QUANTIZATIONS),
        "load-format": (options.load_format, LOAD_FORMATS),
    }
    for name, (choice, allowed) in choices.items():
        if choice not in allowed:
            raise ConfigError(f"{name}: {choice!r}, allowed are {', '.join(allowed)}", name)


def device_of(name: str | None) -> torch.device:
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


def engine_device(options: EngineOptions) -> torch.device:
    """Of its rank 0: CUDA devices are those of one data-parallel group after the other. Raises ConfigError where there
    are not enough."""
    device = device_of(options.device)
    layout, group = options.layout, options.data_parallel_rank
    if device.type == "cpu" or (layout.group_size == 1 and not group):
        return device
    first = rank_device(options, device, group * layout.group_size)
    last, found = rank_device(options, first, layout.group_size - 1), torch.cuda.device_count()
    if (last.index or 0) >= found:
        sizes = {TENSOR: layout.tensor, PIPELINE: layout.pipeline, DATA: layout.data}
        name = max(sizes, key=lambda each: sizes[each])
        why = f"the last rank of {layout} would be on {last}, this machine has {found} CUDA devices"
        raise ConfigError(f"{name}: {sizes[name]}, {why}", name)
    return first


def rank_device(options: EngineOptions, first: torch.device, rank: int) -> torch.device:
    """Of a rank, where rank 0 has the first."""
    if first.type == "cpu":
        return first
    return torch.device("cuda", (first.index or 0) + (0 if options.one_device else rank))


def dtype_of(name: str | None) -> torch.dtype | None:
    if name in (None, "auto"):
        return None
    if name not in DTYPES:
        raise ConfigError(f"dtype: {name!r}, allowed are auto, {', '.join(DTYPES)}", "dtype")
    return DTYPES[name]
