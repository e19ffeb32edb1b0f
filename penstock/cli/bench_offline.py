"""`penstock bench latency` and `penstock bench throughput`: an engine in this process, without a server."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from penstock.cli.options import add_flag, between, integer

if TYPE_CHECKING:
    from penstock.bench.dataset import Dataset
    from penstock.workload.requests import WorkRequest

# flags that go to the engine as they are; one that is not given leaves the engine's default
ENGINE_FLAGS = (
    *("dtype", "quantization", "max_num_seqs", "max_model_len", "max_num_batched_tokens"),
    *("isa", "graph_mode", "kv_address_mode", "kv_layout", "kv_cache_dtype"),
    *("tensor_parallel_size", "pipeline_parallel_size"),
)


def add_latency_parser(kinds: Any) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        "latency", allow_abbrev=False, help="time one batch of a fixed shape in this process"
    )
    _engine_flags(parser)
    add_flag(parser, "batch-size", integer(1), default=8)
    add_flag(parser, "input-len", integer(1), default=32, help="prompt tokens")
    add_flag(parser, "output-len", integer(1), default=128, help="generated tokens")
    add_flag(parser, "num-iters", integer(1), default=30)
    add_flag(parser, "num-iters-warmup", integer(0), default=3)
    add_flag(parser, "seed", integer(0, 2**63 - 1), default=0)
    return parser


def add_throughput_parser(kinds: Any) -> argparse.ArgumentParser:
    """Without the flags of a workload."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "throughput", allow_abbrev=False, help="hand many prompts to an engine in this process at once"
    )
    _engine_flags(parser)
    add_flag(parser, "num-warmups", integer(0), default=3, help="prompts before the run, which are not counted")
    return parser


def latency(args: argparse.Namespace) -> dict[str, Any]:
    """The result of a `latency` document."""
    import msgspec
    from rich.console import Console

    from penstock.bench.offline import measure_latency
    from penstock.bench.report import live_counts
    from penstock.core.clock import SystemClock
    from penstock.workload.requests import WorkRequest

    llm, ids, params = _engine(args)
    size, batches = args.batch_size, args.num_iters + args.num_iters_warmup
    shapes = [
        WorkRequest(number=number, at=0.0, prompt_tokens=args.input_len, output_tokens=args.output_len)
        for number in range(batches * size)
    ]
    prompts = _prompts(shapes, args.seed, ids)
    with live_counts(Console(), args.num_iters) as counts:
        result = measure_latency(
            llm,
            [prompts[i : i + size] for i in range(0, len(prompts), size)],
            params(args.output_len),
            SystemClock(),
            warmups=args.num_iters_warmup,
            progress=counts.batch,
        )
    return {"latency": msgspec.to_builtins(result)}


def throughput(args: argparse.Namespace, dataset: Dataset) -> dict[str, Any]:
    """The result of a `throughput` document."""
    import msgspec
    from rich.console import Console

    from penstock.bench.offline import measure_throughput
    from penstock.core.clock import SystemClock
    from penstock.workload.requests import limit_context, unrelated

    requests = dataset.build()
    llm, ids, params = _engine(args)
    requests, cut = limit_context(requests, llm.max_model_len)
    prompts = _prompts(requests, args.seed, ids)
    if warm_up := unrelated(requests, args.num_warmups):
        llm.generate(_prompts(warm_up, args.seed, ids), [params(r.output_tokens) for r in warm_up])
    shown = _WithProgress(llm) if Console().is_terminal else llm
    result = measure_throughput(shown, prompts, [params(r.output_tokens) for r in requests], SystemClock())
    return {"throughput": msgspec.to_builtins(result), "workload": {"cut": cut}}


class _WithProgress:
    """An `LLM` that shows how far it is."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        found: list[Any] = self._llm.generate(prompts, params, progress=True)
        return found


def _engine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="demo", help="a Hugging Face folder, a hub name, or demo")
    group.add_argument("--dtype")
    group.add_argument("--quantization", help="of a plain checkpoint: int8, int4, fp8, hqq4, hqq3 or hqq2")
    add_flag(group, "max-num-seqs", integer(1))
    add_flag(group, "max-model-len", integer(2))
    add_flag(group, "max-num-batched-tokens", integer(1))
    group.add_argument("--graph-mode", help="how a step is computed: eager, partial, full or auto")
    group.add_argument("--kv-address-mode", help="how a sequence's blocks are addressed: table, contiguous or auto")
    group.add_argument("--kv-layout", help="order of a KV block's bytes: block, token or auto")
    group.add_argument("--kv-cache-dtype", help="data type of KV: int8, fp8 or auto")
    group.add_argument(
        "--isa",
        default=os.environ.get("PENSTOCK_ISA"),
        help="instruction set whose kernels are used, such as avx2 (default: PENSTOCK_ISA, or the best one)",
    )
    add_flag(group, "tensor-parallel-size", integer(1), help="ranks that every layer is spread over")
    add_flag(group, "pipeline-parallel-size", integer(1), help="stages of so many ranks, each with some of the layers")
    add_flag(group, "temperature", between(0, 2), default=0.0)
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)


def _engine(args: argparse.Namespace) -> tuple[Any, Any, Callable[[int], Any]]:
    """(the engine, token ids for prompts, number of tokens -> sampling parameters)"""
    import numpy as np

    from penstock.bench.words import WORDS
    from penstock.core.sampling import SamplingParams
    from penstock.llm import LLM
    from penstock.workload.requests import safe_ids

    given = {name: value for name in ENGINE_FLAGS if (value := getattr(args, name)) is not None}
    llm = LLM(args.model, **given)
    if getattr(args, "vocab_size", None) is not None:
        ids = safe_ids(args.vocab_size)
    else:
        ids = np.unique(llm.tokenizer.encode(" ".join(WORDS), add_special_tokens=False))

    def params(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=args.temperature, ignore_eos=args.ignore_eos, max_tokens=tokens)

    return llm, ids, params


def _prompts(requests: Sequence[WorkRequest], seed: int, ids: Any) -> list[list[int]]:
    from penstock.workload.requests import materialise

    return [materialise(request, seed, ids).tolist() for request in requests]
