"""What --help shows beside flags: commands and flags in groups, and examples."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping

from penstock.cli.options import Option

WIDTH = 100
COMMANDS = {  # title -> commands; those that are in none come last
    "serve": ("serve", "up", "join"),
    "use": ("chat", "batch"),
    "operate": ("top", "explain", "replay", "drill", "doctor", "completion"),
    "measure and plan": ("bench", "plan", "sim"),
}
FLAGS = {  # of penstock serve: title -> names
    "model": (
        *("served-model-name", "chat-template", "override-generation-config", "pooling", "dtype", "quantization"),
        *("load-format", "weight-cache"),
    ),
    "endpoint": (
        "host",
        "port",
        "root-path",
        "allowed-origins",
        "allowed-methods",
        "allowed-headers",
        "allow-credentials",
    ),
    "tools and reasoning": ("tool-call-parser", "enable-auto-tool-choice", "reasoning-parser"),
    "answers": (
        "return-tokens-as-token-ids",
        "enable-force-include-usage",
        "enable-per-request-metrics",
        "enable-tokenizer-info-endpoint",
    ),
    "images and videos": (
        "max-media-count",
        "max-media-bytes",
        "max-media-pixels",
        "max-video-frames",
        "allowed-media-domains",
        "media-fetch-timeout",
        "media-decode-timeout",
        "media-cache-memory",
        "encode-beside",
    ),
    "files and batches": ("batch-dir", "max-file-size"),
    "API keys": ("api-key", "api-key-file", "share-prefixes"),
    "TLS": ("ssl-certfile", "ssl-keyfile", "ssl-ca-certs", "ssl-cert-reqs"),
    "limits": (
        "max-queued-requests",
        "max-queued-tokens",
        "max-body-size",
        "send-timeout",
        "drain-timeout",
        "max-model-len",
        "max-num-seqs",
        "max-num-batched-tokens",
        "step-time-limit-ms",
    ),
    "device": (
        "device",
        "isa",
        "tensor-parallel-size",
        "pipeline-parallel-size",
        "data-parallel-size",
        "enable-expert-parallel",
        "enable-eplb",
        "eplb-config",
        "enable-dbo",
        "helper-kv-memory",
        "gpu-memory-utilization",
        "enable-sleep-mode",
    ),
    "KV cache": (
        "kv-cache-dtype",
        "kv-cache-memory",
        "enable-prefix-caching",
        "tail-key-interval",
        "host-cache-memory",
        "disk-cache",
        "disk-cache-size",
        "remote-cache",
    ),
    "steps": (
        "scheduling-policy",
        "speculative-config",
        "async-scheduling",
        "graph-mode",
        "kv-address-mode",
        "kv-layout",
        "seed",
    ),
    "logs, metrics, traces and recordings": (
        "log-level",
        "log-format",
        "metrics-compat",
        "otlp-traces-endpoint",
        "flight-recorder",
        "record-requests",
        "record-requests-size",
    ),
}
EXAMPLES = {
    "serve": (
        "penstock serve",
        "penstock serve Qwen/Qwen3-0.6B --max-model-len 8192",
        "penstock serve ./checkpoint --host 0.0.0.0 --api-key-file keys --ssl-certfile tls.crt --ssl-keyfile tls.key",
        "penstock serve ./checkpoint --tensor-parallel-size 2 --kv-cache-memory 16G --disk-cache /var/cache/kv",
    ),
    "up": (
        "penstock up recipes/colocated.yaml --check",
        "penstock up recipes/disaggregated.yaml",
        "penstock up --apply recipes/colocated.yaml",
    ),
    "join": ("penstock join 10.0.0.1:7600 second.yaml",),
    "chat": ("penstock chat", "penstock chat --url https://llm.example --system 'Answer in one sentence.'"),
    "batch": (
        "penstock batch requests.jsonl -o answers.jsonl",
        "penstock batch requests.jsonl -o answers.jsonl --url http://10.0.0.1:8000",
    ),
    "top": ("penstock top", "penstock top --url http://10.0.0.1:8000 --json"),
    "explain": ("penstock explain REQUEST", "penstock explain REQUEST --file decisions.bin --policy round_robin"),
    "replay": ("penstock replay FOLDER --serve ./checkpoint", "penstock replay FOLDER --request REQUEST"),
    "drill": (
        "penstock drill recipes/drill-demo.yaml --check",
        "penstock drill recipes/drill-demo.yaml --html drill.html",
    ),
    "bench": (
        "penstock bench serve --num-prompts 200 --request-rate 4 --json result.json",
        "penstock bench slo --goodput ttft:500 tpot:50",
        "penstock bench kernels --model ./checkpoint",
    ),
    "plan": ("penstock plan --scenario scenarios/roles-azure-conv.yaml --devices h200:8",),
    "sim": (
        "penstock sim run scenarios/roles-azure-conv.yaml --html page.html",
        "penstock sim compare scenarios/roles-azure-conv.yaml",
    ),
    "doctor": ("penstock doctor",),
    "completion": (
        'eval "$(penstock completion bash)"',
        "penstock completion zsh > ~/.zfunc/_penstock",
        "penstock completion fish > ~/.config/fish/completions/penstock.fish",
    ),
}


def add_examples(commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Put them at the end of each command's help."""
    for name, parser in commands.items():
        if name in EXAMPLES:
            parser.formatter_class = _Formatter
            parser.epilog = "examples:\n" + "".join(f"  {line}\n" for line in EXAMPLES[name])


class _Formatter(argparse.HelpFormatter):
    """As the usual one, but examples stay on lines of their own."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith("examples:\n") else super()._fill_text(text, width, indent)


def overview(usage: str, described: Mapping[str, str]) -> str:
    """
    Args:
        described: what each command is for.
    """
    listed = {name for names in COMMANDS.values() for name in names}
    groups = {**COMMANDS, "more": tuple(name for name in described if name not in listed)}
    width = max(map(len, described)) + 4
    lines = [usage, "Serve large language models."]
    for title, names in groups.items():
        known = [name for name in names if name in described]
        lines += ["", f"{title}:"] if known else []
        for name in known:
            filled = textwrap.wrap(described[name], WIDTH - width) or [""]
            lines += [f"  {name:{width - 2}}{filled[0]}", *(" " * width + line for line in filled[1:])]
    lines += ["", "penstock COMMAND --help says more; penstock --version which version this is."]
    lines += ["", "examples:", *(f"  {EXAMPLES[name][0]}" for name in ("serve", "up", "chat", "bench"))]
    return "\n".join(lines) + "\n"


def grouped(options: tuple[Option, ...]) -> dict[str, list[Option]]:
    """The options of penstock serve by their groups."""
    by_name = {option.name: option for option in options}
    found = {title: [by_name.pop(name) for name in names] for title, names in FLAGS.items()}
    return {**found, **({"more": list(by_name.values())} if by_name else {})}
