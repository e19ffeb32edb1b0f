"""`penstock plan --objective`: over how many devices to spread a model, by the step-time model alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.options import Option, integer, number, one_of
from penstock.cli.output import as_json
from penstock.core.device import WEIGHT_BITS
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.core.device import DeviceModel, ModelShape
    from penstock.sim.layouts import Decoding, Judged, Objective, Spread

IMAGES = "images"  # see `plan_route`
OBJECTIVES = ("latency", "throughput", "mixed", IMAGES)
NEEDED = ("concurrency", "prompt-tokens", "output-tokens")

FLAGS = (
    Option(
        "objective",
        one_of(*OBJECTIVES),
        None,
        "choose TP x DP instead: latency (of a token), throughput (of a device), or mixed (one layout for both "
        "stages); or, with a trace, images: the route and the split of their stages",
    ),
    Option("concurrency", integer(1, 1_000_000), None, "with --objective: sequences at once"),
    Option("prompt-tokens", integer(1, 1 << 24), None, "with --objective: of each"),
    Option("output-tokens", integer(1, 1 << 24), None, "with --objective: of each"),
    Option("drafts", integer(1, 64), None, "with --objective: tokens that a step computes of a sequence, besides one"),
    Option("accepted", number(0, 64), None, "with --objective: tokens that it gets of these, in the mean"),
    Option("quantization", one_of("auto", *WEIGHT_BITS), None, "with --objective: what weights are quantised to"),
    Option("layouts", str, None, "with --objective: only these, as 4TP,1TP8DP (default: all that use every device)"),
)


def choose(values: Mapping[str, Any], available: Mapping[str, int], out: Any) -> int:
    """Show and write what was found; 1 when no layout has room for one sequence. Raises ConfigError."""
    from rich.console import Console

    from penstock.cli.devices import load_geometry
    from penstock.sched.steptime import DEVICES
    from penstock.sim.layouts import Decoding, best, judge

    for name in NEEDED:
        if values[name.replace("-", "_")] is None:
            raise ConfigError(f"--{name}: needed with --objective", name)
    if len(available) > 1:
        raise ConfigError(f"--devices: {', '.join(available)}, allowed with --objective is one kind", "devices")
    if values["geometry"] is None:
        raise ConfigError("--geometry: needed with --objective", "geometry")
    drafts, accepted = values["drafts"] or 0, values["accepted"] or 0.0
    if accepted > drafts:
        raise ConfigError(f"--accepted: {accepted:g}, allowed are up to the {drafts} of --drafts", "accepted")
    ((name, count),) = available.items()
    device, shape = DEVICES[name], load_geometry(values["geometry"])
    shape = shape.quantised(values["quantization"] or "auto").storing(values["kv_cache_dtype"] or "auto")
    asked = Decoding(
        clients=values["concurrency"],
        prompt=values["prompt_tokens"],
        output=values["output_tokens"],
        rows=1 + drafts,
        accepted=1 + accepted,
        tpot_ms=values["tpot_ms"],
    )
    tried = _tried(values["layouts"], count, shape)
    judged = [found for spread in tried if (found := judge(spread, device, shape, asked)) is not None]
    console = Console()
    if not judged:
        console.print(f"No layout of {count} {name} has room for the weights and one sequence.", highlight=False)
        return 1
    objective: Objective = values["objective"]
    winner = best(judged, objective, asked)
    console.print(_table(judged, winner, objective, f"{count} {name}", asked))
    for other in judged:
        console.print(f"{other.spread.title}: {_why(other, winner, objective, device, asked)}", highlight=False)
    console.print(f"For {objective}: {winner.spread.title}, {_flags(winner.spread)}.", highlight=False)
    if out is not None:
        rows = [_row(found, objective, device, winner, asked) for found in judged]
        content = {"objective": objective, "devices": {name: count}, "winner": winner.spread.title, "layouts": rows}
        Path(out).write_text(as_json(content), encoding="utf-8")
    return 0


def _tried(text: str | None, devices: int, shape: ModelShape) -> list[Spread]:
    from penstock.sim.layouts import spreads

    every = spreads(devices, shape)
    if text is None:
        return every
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        match = re.fullmatch(r"(\d+)TP(?:(\d+)DP)?(?:x\d+)?", word)
        wanted = (int(match[1]), int(match[2] or 1)) if match else None
        fitting = [spread for spread in every if (spread.tensor, spread.data) == wanted]
        if not fitting:
            allowed = ", ".join(spread.title for spread in every)
            raise ConfigError(f"--layouts: {word!r}, allowed for {devices} devices are {allowed}", "layouts")
        found += fitting
    return found


def _flags(spread: Spread) -> str:
    parts = [f"--tensor-parallel-size {spread.tensor}"]
    if spread.data > 1:
        parts += [f"--data-parallel-size {spread.data}", "--enable-expert-parallel"]
    return f"{spread.instances} x {' '.join(parts)}"


def _table(judged: Sequence[Judged], winner: Judged, objective: Objective, devices: str, asked: Decoding) -> Any:
    from rich.table import Table

    title = f"{asked.clients} sequences of {asked.prompt} + {asked.output} tokens on {devices}, for {objective}"
    table = Table(title=title, title_justify="left")
    table.add_column("layout", no_wrap=True)
    for name in ("decode at once", "room", "step ms", "token ms", "tokens/s per device", "prompt ms"):
        table.add_column(name, justify="right")
    for found in judged:
        cells = (f"{found.running:.0f}", str(found.room), f"{found.step_ms:.1f}", f"{found.token_ms:.1f}")
        style = "bold green" if found is winner else None
        table.add_row(found.spread.title, *cells, f"{found.rate:.0f}", f"{found.prompt_ms:,.0f}", style=style)
    return table


def _why(found: Judged, winner: Judged, objective: Objective, device: DeviceModel, asked: Decoding) -> str:
    """What its step consists of, what limits it, and what of it is decided on."""
    names = {"gemm": "dense weights", "lm_head": "head", "decode_attention": "attention"}
    parts = sorted(found.parts.items(), key=lambda part: -part[1])[:3]
    shown = ", ".join(f"{names.get(name, name)} {ms:.1f} ms" for name, ms in parts)
    limits = []
    if found.running < asked.clients:
        limits.append(f"{asked.clients - found.running:.0f} wait for room")
    if found.spread.size > device.host_devices:
        limits.append("collectives go over the network")
    mark = {
        "latency": f"{found.token_ms / winner.token_ms:.2f} of the winner's token",
        "throughput": f"{found.rate / winner.rate:.2f} of its rate",
        "mixed": f"{found.held:.0f} sequences for each second of a prompt",
    }[objective]
    return "; ".join([shown, *limits, mark if found is not winner or objective == "mixed" else "taken"])


def _row(found: Judged, objective: Objective, device: DeviceModel, winner: Judged, asked: Decoding) -> dict[str, Any]:
    return {
        "layout": found.spread.title,
        "tensor_parallel": found.spread.tensor,
        "data_parallel": found.spread.data,
        "instances": found.spread.instances,
        "room": found.room,
        "running": found.running,
        "step_ms": found.step_ms,
        "token_ms": found.token_ms,
        "tokens_per_second_per_device": found.rate,
        "prompt_ms": found.prompt_ms,
        "parts_ms": found.parts,
        "why": _why(found, winner, objective, device, asked),
    }
