"""`penstock serve`: engine processes, and in this one the master, and the frontend behind an HTTP server."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.curve import SECRET
from penstock.cli.help import grouped
from penstock.cli.http import ModelOptions, ServerOptions, allow_connections, bind, set_up_logging
from penstock.cli.options import (
    Option,
    add_options,
    host,
    integer,
    number,
    one_of,
    read_options,
    size,
    switch,
    text,
    words,
)
from penstock.cli.reloaded import check_files
from penstock.cli.run_folder import run_folder
from penstock.core.device import QUANTIZATIONS
from penstock.core.errors import ConfigError
from penstock.core.layout import KV_DTYPES
from penstock.core.parallel import DATA, EXPERTS, MOST_RANKS
from penstock.core.plan import BLOCK_TOKENS
from penstock.core.sizes import MEDIA_CACHE
from penstock.kv.keys import TAIL_INTERVAL
from penstock.sched.local import LOCAL_POLICIES, speculation
from penstock.sched.parallel.rebalancing import checked_eplb
from penstock.service.checkpoint import checked_override, find_checkpoint
from penstock.text.reasoning import REASONING
from penstock.text.tools import PARSERS as TOOL_PARSERS

if TYPE_CHECKING:
    from penstock.service.deployment import Deployment, Group
    from penstock.service.supervisor import ProcessKind


def device(name: str) -> str:
    if name.startswith("modelled:"):  # which engines of a deployment may have
        raise ValueError("cpu, cuda or cuda:N; modelled devices are for penstock up")
    return name


def folder(name: str, what: str = "folder") -> str:
    """Its path from the root: what uses it may run elsewhere. It need not be there."""
    try:
        return str(Path(text(name)).expanduser().absolute())
    except RuntimeError:
        raise ValueError(f"a {what}, where it begins with ~ of a user that there is") from None


def file(name: str) -> str:
    """As `folder`. Where it is a link, what that leads to may change."""
    return folder(name, "file")


def cert_reqs(value: str) -> str:
    """Also by the numbers of Python's ssl, as vLLM has them."""
    return one_of("none", "optional", "required")({"0": "none", "1": "optional", "2": "required"}.get(value, value))


def listed(value: str) -> tuple[str, ...]:
    """Comma-separated, or a JSON list, as vLLM has them."""
    if not value.startswith("["):
        return words(value)
    with contextlib.suppress(ValueError):
        found = json.loads(value)
        if all(isinstance(each, str) and each for each in found):
            return tuple(found)
    raise ValueError("names separated by commas, or a JSON list of them")


def root_path(value: str) -> str:
    if not value.startswith("/") or set("?#% ") & set(value) or "//" in value:
        raise ValueError("a path from the root, such as /llm")
    return value.rstrip("/")


ENGINE_OPTIONS = (
    Option("device", device, None, "cpu, cuda or cuda:N; by default CUDA where there is one"),
    Option(
        "dtype",
        one_of("auto", "bfloat16", "float16", "float32"),
        "auto",
        "data type of weights; auto is the checkpoint's",
    ),
    Option(
        "quantization",
        one_of(*QUANTIZATIONS),
        "auto",
        "quantise a plain checkpoint when it is loaded: int8, int4, fp8, hqq4, hqq3 or hqq2; one that is quantised "
        "needs no flag",
    ),
    Option(
        "kv-cache-dtype",
        one_of(*KV_DTYPES),
        "auto",
        "data type of KV; auto is that of weights, int8 takes half the memory of bfloat16; fp8 is for GPUs",
    ),
    Option(
        "tensor-parallel-size",
        integer(1, MOST_RANKS),
        1,
        "ranks that every layer is spread over: processes, each with its share of the cores",
    ),
    Option(
        "pipeline-parallel-size",
        integer(1, MOST_RANKS),
        1,
        "stages of so many ranks, each with some of the layers; as many steps are on their way as there are stages",
    ),
    Option(
        "data-parallel-size",
        integer(1, MOST_RANKS),
        1,
        "engines of so many ranks, each with its own requests; with enable-expert-parallel they share experts",
    ),
    Option("enable-expert-parallel", switch, False, "spread experts over ranks, whole ones; else each rank has a part"),
    Option("enable-eplb", switch, False, "move experts between ranks, beside steps, such that all have as much to do"),
    Option(
        "eplb-config",
        checked_eplb,
        "{}",
        'how: an object such as {"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 8, '
        '"log_balancedness": false}',
        takes_object=True,
    ),
    Option("enable-dbo", switch, False, "compute a step as two micro-batches where that hides what ranks exchange"),
    Option(
        "helper-kv-memory",
        size,
        None,
        "memory of a data-parallel group for copies of others' KV, over which it attends for them while it would wait, "
        "such as 1G; by default none",
    ),
    Option("max-model-len", integer(2), None, "prompt and output tokens of one sequence; by default the checkpoint's"),
    Option("max-num-seqs", integer(1, 65536), 128, "sequences that run at once"),
    Option("max-num-batched-tokens", integer(1), None, "tokens in one step; by default measured while it runs"),
    Option(
        "step-time-limit-ms",
        number(0),
        None,
        "limit of a step's duration with prompts in it, whatever their length; by default 100, on a CPU up to 500 "
        "where streams allow it",
    ),
    Option(
        "kv-cache-memory", size, None, "size of the KV cache, such as 4G; by default what is free, on a CPU at most 4G"
    ),
    Option(
        "host-cache-memory",
        size,
        None,
        "size of a KV tier in the host's memory, below a GPU's, such as 64G; by default none",
    ),
    Option(
        "disk-cache",
        folder,
        None,
        "folder for a KV tier on a disk of this machine; it outlives the server; by default none",
    ),
    Option("disk-cache-size", size, None, "size of it, of each engine; by default 16G"),
    Option(
        "remote-cache",
        text,
        None,
        "URL of a KV tier that engines share, such as file:///PATH where hosts share PATH, or mooncake://HOST:PORT",
    ),
    Option("media-cache-memory", size, MEDIA_CACHE, "size of the embeddings of images that an engine keeps"),
    Option(
        "encode-beside",
        one_of("auto", "on", "off"),
        "auto",
        "look at images beside steps, which do not wait for it; the tokens are the same",
    ),
    Option("gpu-memory-utilization", number(0, 1), 0.9, "share of a GPU's memory that may be used"),
    Option("enable-prefix-caching", switch, True, "reuse the KV of cached prefixes"),
    Option(
        "tail-key-interval",
        integer(0, BLOCK_TOKENS - 1),
        TAIL_INTERVAL,
        "tokens between the places inside a block of 64 at which a cached prefix may end; 0: only at a block's end",
    ),
    Option(
        "scheduling-policy",
        one_of(*LOCAL_POLICIES),
        "slack",
        "fcfs: by priority and arrival; slack: by targets of latency, priority and the work that is left",
    ),
    Option(
        "speculative-config",
        speculation.checked,
        "auto",
        'drafts that a step checks beside the next token: auto, off, or an object such as {"method": "ngram", '
        '"num_speculative_tokens": 4}, or method "mtp" for models with a layer that predicts further tokens; the '
        "tokens are the same",
        takes_object=True,
    ),
    Option("async-scheduling", switch, True, "schedule the next step while one runs; the tokens are the same"),
    Option(
        "kv-address-mode",
        one_of("auto", "contiguous", "table"),
        "auto",
        "how kernels see a sequence's KV: one range, or a table of blocks; auto is what measures faster",
    ),
    Option(
        "kv-layout", one_of("auto", "block", "token"), "auto", "order of a KV block's bytes; see docs/performance.md"
    ),
    Option(
        "graph-mode",
        one_of("auto", "eager", "partial", "full"),
        "auto",
        "how a step is computed: op by op, in two calls a layer, or as one call; auto takes the last that can be",
    ),
    Option(
        "load-format",
        one_of("auto", "mmap", "sequential"),
        "auto",
        "how a checkpoint's files are read: mapped, or each once from its beginning to its end, by one rank for all; "
        "auto maps those that are in memory already",
    ),
    Option("isa", text, None, "instruction set whose kernels a CPU computes with; by default the best that it has"),
    Option("weight-cache", switch, True, "keep packed weights in ~/.cache/penstock/weights, and map them at a start"),
)
SERVER_OPTIONS = (
    Option("host", host, "127.0.0.1", "address to listen on"),
    Option("port", integer(0, 65535), 8000, "port to listen on; 0 takes a free one"),
    Option("served-model-name", words, None, "names that clients may use, separated by commas; by default MODEL"),
    Option("api-key", words, (), "keys, separated by commas, one of which every request must bring"),
    Option(
        "api-key-file", file, None, "file with more of them, one in each line; what changes there holds within seconds"
    ),
    Option("share-prefixes", switch, False, "share cached prefixes among requests with different API keys"),
    Option(
        "ssl-certfile",
        file,
        None,
        "PEM file of the server's certificate and its chain: HTTPS is served; read again when it changes",
    ),
    Option(
        "ssl-keyfile", file, None, "PEM file of its key, without a passphrase; by default in the certificate's file"
    ),
    Option("ssl-ca-certs", file, None, "PEM file of the CAs that have signed clients' certificates"),
    Option(
        "ssl-cert-reqs",
        cert_reqs,
        "none",
        "whether clients bring a certificate of these: none, optional or required; or 0, 1, 2",
    ),
    Option(
        "allowed-origins", listed, (), "origins whose pages may call this server (CORS), * for all; by default none"
    ),
    Option("allowed-methods", listed, ("*",), "methods that they may use"),
    Option("allowed-headers", listed, ("*",), "headers that they may send"),
    Option("allow-credentials", switch, False, "whether they may send cookies and client certificates"),
    Option(
        "root-path", root_path, "", "where a proxy in front has this server, such as /llm, stripped from paths or not"
    ),
    Option("chat-template", text, None, "a Jinja file, or the template itself, instead of the checkpoint's"),
    Option(
        "override-generation-config",
        checked_override,
        None,
        "sampling parameters of requests that do not give them, before the checkpoint's: an object such as "
        '{"temperature": 0.6, "max_new_tokens": 512}',
        takes_object=True,
    ),
    Option(
        "tool-call-parser",
        one_of("auto", *TOOL_PARSERS),
        "auto",
        "how the model writes tool calls; auto is what its chat template shows, or else what its architecture does",
    ),
    Option("enable-auto-tool-choice", switch, True, "leave it to the model whether to call tools, if a request does"),
    Option("reasoning-parser", one_of(*REASONING), None, "how the model marks what it thinks; by default not at all"),
    Option(
        "pooling",
        one_of("auto", "last", "mean"),
        "auto",
        "which hidden states become an embedding, normalised: the last token's, or the mean; auto is what the "
        "checkpoint says, else the last token's",
    ),
    Option("max-media-count", integer(0), 16, "images and videos of a request"),
    Option("max-media-bytes", size, 20 << 20, "size of each, as it comes; those in a body count for max-body-size too"),
    Option("max-media-pixels", integer(1), 1 << 26, "pixels of each, when it is decoded"),
    Option("max-video-frames", integer(1), 64, "frames of a video that a model looks at"),
    Option(
        "allowed-media-domains",
        listed,
        (),
        "hosts from which images and videos may be fetched; by default requests have to bring them as data: URLs",
    ),
    Option("media-fetch-timeout", number(0, 3600), 5.0, "seconds that it may take to fetch one"),
    Option("media-decode-timeout", number(0, 3600), 20.0, "seconds that it may take to decode one"),
    Option("max-queued-requests", integer(1), 4096, "sequences held at once, running and waiting; more get a 429"),
    Option(
        "max-queued-tokens",
        integer(1),
        None,
        "prompt tokens that wait for a first token; more get a 429; by default four times what the KV caches hold",
    ),
    Option("seed", integer(0), None, "of the generator of seeds for requests without one; by default unpredictable"),
    Option("drain-timeout", integer(0), 30, "seconds that running requests get to finish after SIGTERM"),
    Option(
        "send-timeout",
        number(0, 86400),
        60.0,
        "seconds without progress in sending to a client, after which it is disconnected",
    ),
    Option("log-level", one_of("debug", "info", "warning", "error"), "info", "level of the log on standard error"),
    Option("log-format", one_of("text", "json"), "text", "format of the log"),
    Option("max-body-size", size, 8 << 20, "bytes of a request's body; longer ones get a 413"),
    Option("metrics-compat", one_of("none", "vllm"), "none", "vllm: metrics also under the names that vLLM gives them"),
    Option("otlp-traces-endpoint", text, None, "where OpenTelemetry traces go, over HTTP; needs penstock[otel]"),
    Option("enable-sleep-mode", switch, False, "serve /sleep and /wake_up, by which engines give back their memory"),
    Option(
        "record-requests",
        folder,
        None,
        "folder where prompts, sampling fields and tokens of all requests are written, for `penstock replay`; by "
        "default they are written nowhere",
    ),
    Option("record-requests-size", size, 1 << 30, "bytes of it, for each frontend; then the oldest requests go"),
    Option(
        "batch-dir",
        folder,
        None,
        "folder where files and batches are kept, which /v1/files and /v1/batches need; by default these are off",
    ),
    Option("max-file-size", size, 1 << 30, "bytes of an uploaded file; longer ones get a 413"),
    Option(
        "return-tokens-as-token-ids",
        switch,
        False,
        "log-probabilities name tokens token_id:ID, unless a request says otherwise",
    ),
    Option(
        "enable-force-include-usage",
        switch,
        False,
        "all events of streams say how much was used, whatever requests say",
    ),
    Option("enable-per-request-metrics", switch, False, "answers say how long they took, in their field metrics"),
    Option("enable-tokenizer-info-endpoint", switch, False, "serve /tokenizer_info, which shows the chat template"),
)
OF_MODEL = (  # keys of those that are of a model, not of the server
    *("served_model_name", "chat_template", "tool_call_parser", "enable_auto_tool_choice", "reasoning_parser"),
    *("override_generation_config", "pooling"),
)
FLIGHT_RECORDER = Option("flight-recorder", text, None, "file where every decision is written, for `penstock explain`")
OPTIONS = (*SERVER_OPTIONS, FLIGHT_RECORDER, *ENGINE_OPTIONS)


def add_parser(commands: Any) -> None:
    usage = "penstock serve [-h] [--config FILE] [FLAGS] [model]"
    parser = commands.add_parser("serve", help="serve a model over HTTP", usage=usage, allow_abbrev=False)
    parser.add_argument(
        "model", nargs="?", default="demo", help="a Hugging Face folder, a hub name, demo (default), or demo-vl"
    )
    add_options(parser, grouped(OPTIONS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. 0 after that, 1 when the engine cannot be kept up, 2 when it cannot be served."""
    from penstock.core.clock import SystemClock
    from penstock.service.launcher import LOOK, Launcher
    from penstock.service.programs import plan, threads
    from penstock.service.supervisor import Supervisor

    values = read_options(OPTIONS, args, os.environ)
    directory = find_checkpoint(args.model)
    deployment = describe(args.model, values)
    (group,), server = deployment.groups, ServerOptions(**deployment.server)
    if group.layout.meets and server.enable_sleep_mode:
        raise ConfigError(f"enable-sleep-mode: true, with {DATA} and {EXPERTS} allowed is false", "enable-sleep-mode")
    served = {key: value for key, value in deployment.options.items() if key != "served_model_name"}
    model = ModelOptions(directory=directory, names=deployment.names, **served)
    set_up_logging(server)
    check_files(asdict(server))
    allow_connections()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the server handles it: exit cleanly
    listener = bind(server.host, server.port)
    with run_folder() as folder:
        programs = plan([(deployment, directory)], folder, (), _engine_fields, master="")
        supervisor, clock = Supervisor(programs, deployment.restart, server.drain_timeout), SystemClock()
        environments: dict[ProcessKind, Mapping[str, str]] = {
            "engine": {**threads([deployment]), **os.environ, SECRET: secrets.token_hex(32)}
        }
        with contextlib.closing(Launcher(programs, supervisor, clock, environments)) as launcher:
            launcher.step()  # engines load while this process does
            while launcher.awaits_kv_pool():
                time.sleep(LOOK)
                launcher.step()
            import uvloop

            from penstock.cli.served import Engines, serve

            engines = Engines(programs, launcher, supervisor, clock)
            return uvloop.run(serve(server, model, engines, listener, deployment.policy, deployment.flight_recorder))


def describe(model: str, values: dict[str, Any]) -> Deployment:
    """What the flags say, as a deployment of which this process is the frontend and the master. Several data-parallel
    groups have what they would have in a deployment file. One engine has nobody to hand over to, and leaves nothing to
    decide for which a policy would have to know prefixes.

    Args:
        values: of the flags, by key.
    """
    from penstock.service.deployment import DEFAULT_POLICY, LEASE, ORPHANS, Common, Deployment, Group, Transport
    from penstock.service.supervisor import RestartPolicy

    several = values["data_parallel_size"] > 1
    options = {option.key: values[option.key] for option in ENGINE_OPTIONS} | {"peer_weights": False}
    group = Group(name="engine", count=values["data_parallel_size"], role="any", options=options)
    linked = several and group.shares_memory  # where no device is given, engines find out
    policy, transport = DEFAULT_POLICY if several else "least_loaded", "shared"
    return Deployment(
        model=model,
        common=Common(
            model=model, policy=policy, live_roles=False, priorities={}, scaling=None, transport=transport, lease=LEASE
        ),
        frontends=0,
        server={option.key: values[option.key] for option in SERVER_OPTIONS if option.key not in OF_MODEL},
        options={key: values[key] for key in OF_MODEL},
        groups=(group,),
        policy=policy,
        lease=LEASE,
        transport=Transport(kind=transport, tls=None, faults=None) if linked else None,
        orphans=ORPHANS if linked else None,
        restart=RestartPolicy(backoff=0.5, limit=2, heartbeat_timeout=5.0),  # the third failure in a row is the last
        flight_recorder=values["flight_recorder"],
    )


def engine_options(directory: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Fields of `EngineOptions` from the flags."""
    chosen = {option.key: values[option.key] for option in ENGINE_OPTIONS}
    chosen["prefix_cache"] = chosen.pop("enable_prefix_caching")
    chosen["dtype"] = None if chosen["dtype"] == "auto" else chosen["dtype"]
    return {"model": str(directory), **chosen}


def _engine_fields(directory: Path, group: Group, number: int) -> dict[str, Any]:
    return engine_options(directory, dict(group.options))
