"""`penstock bench KIND`: measure a running server, an engine in this process, or what its steps consist of."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.cli import bench_kernels, bench_offline
from penstock.cli.options import add_flag, between, client_key, integer, number
from penstock.core.errors import ConfigError
from penstock.core.host_port import join_host_port

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.bench.client import Client
    from penstock.bench.dataset import Dataset
    from penstock.bench.serve import Bench, LoadShape, Measurement

POSITIVE = number(0, endless=True)


def add_parser(subparsers: Any) -> None:
    """Adds `bench` to the command line."""
    parser = subparsers.add_parser(
        "bench", allow_abbrev=False, help="measure a server or an engine", description=__doc__
    )
    kinds = parser.add_subparsers(dest="bench_command", required=True, metavar="KIND")

    serve = kinds.add_parser(
        "serve", allow_abbrev=False, help="load a running server and report what its users would see"
    )
    _server_flags(serve)
    _dataset_flags(serve, num_prompts=1000)
    _image_flags(serve)
    arrivals = serve.add_argument_group("arrivals")
    add_flag(arrivals, "request-rate", POSITIVE, help="requests/s, inf for all at once (default: inf, or a trace's)")
    add_flag(arrivals, "trace-scale", number(0, 1e6), default=1.0, help="factor on the trace's own rate")
    add_flag(arrivals, "burstiness", POSITIVE, default=1.0, help="1 is Poisson, less is burstier, inf constant")
    add_flag(
        arrivals, "max-concurrency", integer(1), help="most in flight; without a rate: that many closed-loop users"
    )
    serve.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help="limits on ttft, tpot, e2e in ms")
    serve.add_argument(
        "--verify", action="store_true", help="of modelled engines: compute every text offline, fail when one differs"
    )
    serve.add_argument("--plot", metavar="FILE", help="draw the latency distributions (needs matplotlib)")
    serve.add_argument("--save-detailed", action="store_true", help="keep every request in the --json file")
    _result_flags(serve)
    serve.set_defaults(run=run, benchmark=_serve)

    slo = kinds.add_parser("slo", allow_abbrev=False, help="find the greatest load at which a server keeps limits")
    _server_flags(slo)
    _dataset_flags(slo, num_prompts=100)
    _image_flags(slo)
    _search_flags(slo)
    _result_flags(slo)
    slo.set_defaults(run=run, benchmark=_slo)

    latency = bench_offline.add_latency_parser(kinds)
    _result_flags(latency)
    latency.set_defaults(run=run, benchmark=_latency)

    throughput = bench_offline.add_throughput_parser(kinds)
    _dataset_flags(throughput, num_prompts=1000)
    _result_flags(throughput)
    throughput.set_defaults(run=run, benchmark=_throughput)

    kernels = bench_kernels.add_parser(kinds)
    _result_flags(kernels)
    kernels.set_defaults(run=run, benchmark=_kernels)


def run(args: argparse.Namespace) -> int:
    """Raises `ConfigError` for a bad value, `Unavailable` when no server answers; returns the exit code."""
    from penstock.bench import document

    document.check_writable(args.json, "--json")
    earlier = document.read(args.compare, args.bench_command) if args.compare else None
    return args.benchmark(args, earlier)


def _server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--base-url", help="such as http://127.0.0.1:8000; instead of --host and --port")
    group.add_argument("--host", default="127.0.0.1")
    add_flag(group, "port", integer(1, 65535), default=8000)
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument("--model", help="a name that the server lists (default: its first)")
    group.add_argument("--api-key", default=client_key(os.environ), help="default: the first of PENSTOCK_API_KEY")
    add_flag(group, "timeout", number(0, 1e6), default=600.0, help="seconds that one request may take")
    add_flag(group, "temperature", between(0, 2), default=0.0)
    group.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True)
    group.add_argument("--extra-body", metavar="JSON", help="an object of fields added to every request")
    add_flag(group, "num-warmups", integer(0), default=3, help="requests before the run, which are not counted")


def _dataset_flags(parser: argparse.ArgumentParser, num_prompts: int) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", choices=("random", "prefix", "trace", "lengths"), default="random")
    group.add_argument("--dataset-path", metavar="FILE", help="for trace and lengths; plain or .gz")
    add_flag(group, "num-prompts", integer(1), default=num_prompts, help="requests (of a trace: the first ones)")
    add_flag(group, "random-input-len", integer(1), default=1024, help="prompt tokens, for random and prefix")
    add_flag(group, "random-output-len", integer(1), default=128)
    add_flag(group, "random-range-ratio", between(0, 1), default=0.0, help="draw lengths within this share of them")
    add_flag(group, "prefix-len", integer(1), default=512, help="tokens of a shared prefix, before the random input")
    add_flag(group, "num-prefixes", integer(1), default=10)
    add_flag(group, "prefix-zipf", between(0, 10), default=0.0, help="popularity of prefixes: Zipf exponent, 0 uniform")
    add_flag(group, "trace-start", between(0), default=0.0, help="seconds into the trace")
    add_flag(group, "trace-duration", POSITIVE, default=math.inf, help="seconds of the trace")
    add_flag(
        group, "trace-spread", between(0, 3600), default=0.0, help="spread arrivals over so many seconds (Mooncake: 3)"
    )
    add_flag(
        group,
        "vocab-size",
        integer(1, 1 << 24),
        help="draw prompt tokens from all ids below it (default: common words)",
    )
    add_flag(group, "seed", integer(0, 2**63 - 1), default=0)


def _image_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images")
    add_flag(group, "images", integer(0, 100), default=0, help="of each request; with --endpoint chat")
    add_flag(group, "image-size", _image_size, default=(256, 256), help="WIDTHxHEIGHT in pixels (default: 256x256)")
    add_flag(group, "image-repeats", between(0, 1), default=0.0, help="share of images that came before")


def _image_size(text: str) -> tuple[int, int]:
    sides = text.split("x")
    if len(sides) != 2 or not all(side.isascii() and side.isdecimal() and 0 < int(side) < 1 << 14 for side in sides):
        raise ValueError("WIDTHxHEIGHT in pixels, such as 256x256")
    return int(sides[0]), int(sides[1])


def _search_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument("--goodput", nargs="+", required=True, metavar="NAME:MS", help="limits on ttft, tpot, e2e in ms")
    group.add_argument("--search", choices=("rate", "concurrency"), default="rate")
    target = group.add_mutually_exclusive_group()
    add_flag(target, "attainment", number(0, 1), help="least share of requests that keep all limits (default: 0.9)")
    add_flag(target, "percentile", number(0, 100), help="instead: this percentile of each metric keeps its limit")
    add_flag(group, "start", number(0), default=1.0, help="the first load: requests/s or concurrent requests")
    add_flag(group, "min-load", number(0), help="default: 0.01 requests/s, or 1 concurrent request")
    add_flag(group, "max-load", number(0, 1e6), default=4096.0)
    add_flag(group, "tolerance", between(0.001, 1), default=0.05, help="how exactly to find the edge, as a share of it")
    add_flag(group, "probe-seconds", between(0), default=20.0, help="a rate is held at least so long")
    add_flag(group, "burstiness", POSITIVE, default=1.0, help="1 is Poisson, less is burstier, inf constant")


def _result_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument("--json", metavar="FILE", help="write the result here")
    group.add_argument("--compare", metavar="FILE", help="an earlier --json file to compare with")


def _serve(args: argparse.Namespace, earlier: Mapping[str, Any] | None) -> int:
    import uvloop
    from rich.console import Console

    from penstock.bench import document, report
    from penstock.bench.metrics import parse_limits

    limits = parse_limits(args.goodput)
    if args.plot:
        report.import_pyplot()
        document.check_writable(args.plot, "--plot")
    dataset = _dataset(args)
    requests = dataset.build()
    console = Console()

    async def measure() -> tuple[Bench, Measurement]:
        async with _client(args) as client:
            bench = await _connect(client, args)
            with report.live_counts(console, len(requests)) as counts:
                return bench, await bench.measure(requests, _shape(args, dataset), limits, counts.request)

    bench, measurement = uvloop.run(measure())
    content = document.build("serve", _config(args), document.serve_result(bench, measurement), sys.argv)
    if args.save_detailed:
        content["requests"] = document.request_rows(measurement.records)
    report.show_serve(console, content)
    _finish(args, console, content, earlier)
    if args.plot:
        report.plot_latencies(measurement.records, args.plot)
    differ = measurement.verification is not None and measurement.verification.differ > 0
    return 0 if measurement.summary.completed and not differ else 1


def _slo(args: argparse.Namespace, earlier: Mapping[str, Any] | None) -> int:
    import uvloop
    from rich.console import Console

    from penstock.bench import document, report
    from penstock.bench.metrics import parse_limits
    from penstock.bench.slo import LoadTester, find_greatest_load

    limits = parse_limits(args.goodput)
    whole = args.search == "concurrency"
    low = args.min_load if args.min_load is not None else (1.0 if whole else 0.01)
    _check_search(args, low, whole)
    target = args.percentile / 100 if args.percentile is not None else (args.attainment or 0.9)
    console = Console()

    async def search() -> dict[str, Any]:
        async with _client(args) as client:
            probes = LoadTester(
                await _connect(client, args),
                _dataset(args),
                limits,
                closed_loop=whole,
                each_limit=args.percentile is not None,
                seconds=args.probe_seconds,
                warmups=args.num_warmups,
                live_counts=lambda total: report.live_counts(console, total),
            )
            found = await find_greatest_load(
                probes.measure,
                start=args.start,
                low=low,
                high=args.max_load,
                target=target,
                tolerance=args.tolerance,
                whole=whole,
            )
            return document.slo_result(found, probes.summaries, target, limits)

    content = document.build("slo", _config(args), uvloop.run(search()), sys.argv)
    report.show_slo(console, content)
    _finish(args, console, content, earlier)
    return 0 if content["best"] is not None else 1


def _latency(args: argparse.Namespace, earlier: Mapping[str, Any] | None) -> int:
    from penstock.bench.report import show_latency

    return _report(args, bench_offline.latency(args), show_latency, earlier)


def _throughput(args: argparse.Namespace, earlier: Mapping[str, Any] | None) -> int:
    from penstock.bench.report import show_throughput

    return _report(args, bench_offline.throughput(args, _dataset(args)), show_throughput, earlier)


def _kernels(args: argparse.Namespace, earlier: Mapping[str, Any] | None) -> int:
    return _report(args, bench_kernels.run(args), lambda console, content: None, earlier)  # it has shown its tables


def _report(
    args: argparse.Namespace,
    result: Mapping[str, Any],
    show: Callable[[Console, Mapping[str, Any]], None],
    earlier: Mapping[str, Any] | None,
) -> int:
    from rich.console import Console

    from penstock.bench import document

    console = Console()
    content = document.build(args.bench_command, _config(args), result, sys.argv)
    show(console, content)
    _finish(args, console, content, earlier)
    return 0


def _client(args: argparse.Namespace) -> Client:
    from penstock.bench.client import Client

    url = args.base_url or f"http://{join_host_port(args.host, args.port)}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url: {url}, allowed is http://HOST:PORT or https://HOST:PORT", "base_url")
    url = url.rstrip("/").removesuffix("/v1")
    keep = getattr(args, "verify", False)
    return Client(url, args.endpoint, timeout=args.timeout, api_key=args.api_key, keep_answers=keep)


async def _connect(client: Client, args: argparse.Namespace) -> Bench:
    from penstock.bench.serve import Bench, RequestOptions

    options = RequestOptions(
        model=args.model,
        vocab_size=args.vocab_size,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        extra_body=_extra_body(args.extra_body),
        image_size=args.image_size,
        verify=getattr(args, "verify", False),
    )
    return await Bench.connect(client, options)


def _extra_body(text: str | None) -> dict[str, Any]:
    import msgspec

    if text is None:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--extra-body: {text!r}, allowed is a JSON object ({error})", "extra_body") from error


def _dataset(args: argparse.Namespace) -> Dataset:
    from penstock.bench.dataset import Dataset

    return Dataset(
        name=args.dataset_name,
        path=args.dataset_path,
        count=args.num_prompts,
        input_len=args.random_input_len,
        output_len=args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.prefix_len,
        num_prefixes=args.num_prefixes,
        prefix_zipf=args.prefix_zipf,
        request_rate=getattr(args, "request_rate", None),
        burstiness=getattr(args, "burstiness", 1.0),
        trace_scale=getattr(args, "trace_scale", 1.0),
        trace_start=args.trace_start,
        trace_duration=args.trace_duration,
        trace_spread=args.trace_spread,
        images=_images(args),
        image_repeats=getattr(args, "image_repeats", 0.0),
        seed=args.seed,
    )


def _images(args: argparse.Namespace) -> int:
    count = getattr(args, "images", 0)
    if count and args.endpoint != "chat":
        raise ConfigError(f"--images: {count}, allowed with --endpoint chat alone", "images")
    if count and getattr(args, "verify", False):
        raise ConfigError(
            f"--images: {count}, allowed without --verify: modelled engines draw from the text alone", "images"
        )
    return count


def _shape(args: argparse.Namespace, dataset: Dataset) -> LoadShape:
    """Without a schedule of its own and with a number of users, the loop is closed."""
    from penstock.bench.serve import LoadShape

    return LoadShape(
        scheduled=dataset.has_schedule or args.max_concurrency is None,
        concurrency=args.max_concurrency,
        warmups=args.num_warmups,
        seed=args.seed,
    )


def _check_search(args: argparse.Namespace, low: float, whole: bool) -> None:
    if not low <= args.start <= args.max_load:
        raise ConfigError(f"--start: {args.start:g}, allowed is {low:g} (--min-load) to {args.max_load:g} (--max-load)")
    for flag, load in (("--start", args.start), ("--min-load", low), ("--max-load", args.max_load)):
        if whole and load != int(load):
            raise ConfigError(f"{flag}: {load:g}, allowed is a whole number with --search concurrency")


def _finish(
    args: argparse.Namespace, console: Console, content: Mapping[str, Any], earlier: Mapping[str, Any] | None
) -> None:
    from penstock.bench import document, report

    if args.json:
        document.write(args.json, content)
    if earlier is not None:
        report.compare(console, content, earlier)


def _config(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if not callable(value)}
