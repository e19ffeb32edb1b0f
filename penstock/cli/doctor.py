"""`penstock doctor`: what of this machine will be used, and what is missing."""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock.cli.devices import THIS_MACHINE, MeasuredSteps, measure, save_device, saved_file

VECTOR_UNITS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")
DEVELOPMENT = {"penstock[dev]", "penstock[clients]"}  # what only its own tests need
KERNEL_SECONDS = 0.15  # for each value and kernel
Row = tuple[str, str, str]  # what, "ok" | "missing" | "note", what was found


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("doctor", help="what of this machine will be used", allow_abbrev=False)
    parser.add_argument(
        "--save",
        nargs="?",
        const="",
        metavar="FILE",
        help="write what was measured to a file (default: where scenarios look for the device this-machine)",
    )
    parser.add_argument(
        "--model",
        help="also measure steps of this model, and save what they take: a Hugging Face folder, a hub name, or demo",
    )
    parser.add_argument(
        "--isa",
        metavar="NAME",
        default=os.environ.get("PENSTOCK_ISA"),
        help="measure kernels of this instruction set, and compile them if need be (default: PENSTOCK_ISA, or the best "
        "one and others that are compiled)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the table; 1 when something that serving needs is missing. Raises ConfigError when it cannot be saved, and
    on a model that cannot be served or an instruction set that is not there."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="penstock doctor", title_justify="left", show_header=False, box=None, padding=(0, 2))
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "missing": "[red]missing[/]"}
    save, console = None if args.save is None else Path(args.save) if args.save else saved_file(), Console()
    with console.status("measuring this machine" + (f" and steps of {args.model}" if args.model else "")):
        rows = list(examine(save, args.model, args.isa))
    for what, state, found in rows:
        table.add_row(escape(what), marks[state], escape(found))
    console.print(table)
    return 1 if any(state == "missing" for _, state, _ in rows) else 0


def examine(save: Path | None = None, model: str | None = None, isa: str | None = None) -> Iterator[Row]:
    """All checks, in the order of the table.

    Args:
        save: where what is measured is written, if anywhere.
        model: whose steps are measured too, if any's.
        isa: whose kernels alone are measured; None is those that are there.
    """
    yield "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield from _processor()
    yield from _torch()
    yield from _speed(save, model)
    yield from _packages()
    yield from _demo()
    yield from _kernels(isa)


def _processor() -> Iterator[Row]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    flags = set((named.get("flags") or named.get("Features") or "").split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "processor", "ok", f"{named.get('model name', platform.processor() or 'unknown')}, {cores} cores to use"
    yield "vector units", "ok", " ".join(unit for unit in VECTOR_UNITS if unit in flags) or "none that we know of"


def _torch() -> Iterator[Row]:
    try:
        import torch
    except ImportError as error:
        yield "torch", "missing", str(error)
        return
    yield "torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads"
    from penstock.engine.memory import available_memory

    free, total = available_memory(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", "ok" if free > 1 << 30 else "note", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    yield _large_pages()
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(i)
            name = torch.cuda.get_device_name(i)
            yield f"cuda:{i}", "ok", f"{name}, {free / 2**30:.0f} of {total / 2**30:.0f} GiB free"
    else:
        yield "cuda", "note", "none; models run on the CPU"
    from penstock.nn.ops import OPS

    device = "cuda" if torch.cuda.is_available() else "cpu"
    using: dict[str, list[str]] = {}
    for name, op in OPS.items():
        using.setdefault(op.backend_on(device).name, []).append(name)
    for backend, names in using.items():
        yield f"{backend} ops on {device}", "ok", ", ".join(names)


def _large_pages() -> Row:
    from penstock.core.mappings import can_be_large

    if can_be_large():
        return "large pages", "ok", "weights are in pages of 2 MiB"
    return "large pages", "note", "none that processes share, as Linux has from 6.1 on: a CPU may decode a third slower"


def _kernels(isa: str | None) -> Iterator[Row]:
    """What there are, and how near each of them comes to what the machine can do with its instructions."""
    try:
        from penstock.nn import native
        from penstock.nn.native.build import find_library
        from penstock.nn.native.isa import find_set, sets_here
    except ImportError:
        return  # torch is missing, which was reported
    chosen = sets_here() if isa is None else (find_set(isa),)
    used = native.isa()
    for one in reversed(chosen):
        if isa is None and one != used and find_library(one) is None:
            found = f"not compiled yet; penstock doctor --isa {one.name} does, and measures"
            yield f"kernels {one.name}", "note", found
            continue
        native.use(one.name)
        if (reason := native.missing()) is not None:
            yield "kernels", "note", f"none, they run as plain torch ops: {reason}"
            break
        yield from _of_set(one.name, one == used)
    else:
        if not chosen:
            yield "kernels", "note", f"none, they run as plain torch ops: {native.missing()}"
    native.use(None)


def _of_set(name: str, used: bool) -> Iterator[Row]:
    from penstock.nn import native
    from penstock.nn.ceilings import measure_ceilings, measure_kernels

    most = measure_ceilings(KERNEL_SECONDS)
    speeds = (
        f"{'used, ' * used}{native.threads()} threads: at most {most.flops / 1e9:.0f} GFLOP/s of bfloat16, "
        f"{most.float32 / 1e9:.0f} of float32, reads {most.bandwidth / 1e9:.0f} GB/s"
    )
    yield f"kernels {name}", "ok", speeds
    for kernel in measure_kernels(KERNEL_SECONDS):
        near = (
            f"{kernel.flops / 1e9:.0f} GFLOP/s ({kernel.flops / most.flops:.0%}), "
            f"{kernel.bytes / 1e9:.1f} GB/s ({kernel.bytes / most.bandwidth:.0%} of reads)"
        )
        yield f"  {kernel.name}", "ok", near


def _speed(save: Path | None, model: str | None) -> Iterator[Row]:
    """What a step's time is predicted from."""
    try:
        import torch
    except ImportError:
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    can, float32 = measure(device)
    yield f"speed of {device}", "ok", f"{can.peak_flops:.3g} bfloat16 and {float32:.3g} float32 operations a second"
    yield f"memory of {device}", "ok", f"{can.bandwidth / 1e9:.3g} GB/s, {can.memory / 1e9:.0f} GB"
    steps: MeasuredSteps | None = None
    if model is not None:
        from penstock.cli.steps import fit, measure_steps
        from penstock.service.checkpoint import find_checkpoint

        can, steps = fit(can, *measure_steps(find_checkpoint(model)))
        found = f"{can.overhead_ms:.3g} ms and what is in them, within {steps.noise:.0%} ({steps.count} measured)"
        yield f"steps of {model}", "ok", found
    if save is not None:
        save_device(can, save, steps)
        yield THIS_MACHINE, "ok", f"written to {save}"
    elif saved_file().exists():
        yield THIS_MACHINE, "ok", f"as in {saved_file()}"
    else:
        yield THIS_MACHINE, "note", "not saved; --save lets engines and scenarios predict its step times"


def _packages() -> Iterator[Row]:
    optional: dict[str, list[str]] = {}
    for line in metadata.requires("penstock") or []:
        package = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        extra = re.search(r"extra == .(\w+)", line)
        if extra is not None:
            optional.setdefault(package, []).append(f"penstock[{extra[1]}]")
        elif package != "torch":  # of which more is said
            found = _version(package)
            yield package, "ok" if found else "missing", found or f"pip install '{package}'"
    for package, extras in optional.items():
        if needs := ", ".join(extra for extra in extras if extra not in DEVELOPMENT):
            found = _version(package)
            yield package, "ok" if found else "note", found or f"only for {needs}"


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _demo() -> Iterator[Row]:
    from penstock.service.checkpoint import DEMO

    weights = DEMO / "model.safetensors"
    if weights.exists():
        yield "demo model", "ok", f"{weights.stat().st_size / 1e6:.1f} MB in {DEMO}"
    else:
        yield "demo model", "missing", f"{weights} is not there; tools/train_demo.py makes it"
