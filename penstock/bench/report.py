"""Results as tables and plots for people, and the comparison of two results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from penstock.bench.metrics import ClientRecord
from penstock.core.errors import ConfigError

# what is compared of two documents of a kind: (path into the document, shown as, whether more is better)
STATS = ("mean", "p50", "p90", "p99", "max")
RATES = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
LATENCIES = (
    ("ttft_ms", "TTFT"),
    ("tpot_ms", "TPOT"),
    ("itl_ms", "ITL"),
    ("held_back_ms", "held back"),
    ("e2e_ms", "E2E"),
)

LATE_CLIENT_MS = 20.0
REUSE_SLACK = 0.05  # share of prompt tokens that may be cached beyond the workload's own sharing, as by a chat template


class LiveCounts:
    """A line that moves while a benchmark runs."""

    def __init__(self, bar: Progress, total: int) -> None:
        self._bar = bar
        self._task = bar.add_task("", total=total)
        self._tokens = self._failed = 0

    def request(self, record: ClientRecord) -> None:
        """One request has ended."""
        self._failed += record.error is not None
        self.batch(0 if record.error is not None else record.output_tokens)

    def batch(self, tokens: int) -> None:
        """One more is done and brought so many output tokens."""
        self._tokens += tokens
        elapsed = self._bar.tasks[0].elapsed
        rate = self._tokens / elapsed if elapsed else 0.0
        self._bar.update(self._task, advance=1, description=f"{rate:.0f} output tokens/s, {self._failed} failed")


@contextmanager
def live_counts(console: Console, total: int) -> Iterator[LiveCounts]:
    """Nothing is shown where there is no terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet, refresh_per_second=2) as bar:
        yield LiveCounts(bar, total)


def show_serve(console: Console, document: Mapping[str, Any]) -> None:
    """A `serve` document as tables and notes."""
    summary = document["summary"]
    console.print(_counts(summary))
    console.print(_latencies(summary))
    if summary["goodput"]:
        console.print(_goodput(summary["goodput"]))
    _show_server(console, document["server"])
    if verification := document.get("verification"):
        console.print(_verification(verification))
        for found in verification["differences"]:
            console.print(f"request {found['number']}: {found['what']}", style="red", highlight=False, markup=False)
    for note in notes(document):
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)


def show_slo(console: Console, document: Mapping[str, Any]) -> None:
    """An `slo` document: every probe in the order it was made, then the answer."""
    unit = document["config"]["search"]
    table = Table(title=f"probes, target {document['target']:.1%}; latencies are p90 in ms", box=SIMPLE)
    for name in (unit, "attained", "kept", "requests", "failed", "seconds", "TTFT", "TPOT", "E2E"):
        table.add_column(name, justify="right", no_wrap=True)
    for probe in document["probes"]:
        summary = probe["summary"]
        p90 = (_number(summary[key] and summary[key]["p90"]) for key in ("ttft_ms", "tpot_ms", "e2e_ms"))
        table.add_row(
            f"{probe['load']:.4g}",
            f"{probe['attainment']:.1%}",
            "yes" if probe["kept"] else "no",
            str(summary["requests"]),
            str(summary["failed"]),
            f"{summary['duration_s']:.1f}",
            *p90,
        )
    console.print(table)
    console.print(slo_answer(document), style="bold", highlight=False)


def slo_answer(document: Mapping[str, Any]) -> str:
    """The result of a search in one sentence."""
    unit = {"rate": "requests/s", "concurrency": "concurrent requests"}[document["config"]["search"]]
    limits = " ".join(f"{name}<={limit:g}ms" for name, limit in document["limits_ms"].items())
    best, missed = document["best"], document["missed"]
    if best is None:
        return f"{limits} is missed even at {missed:.4g} {unit}"
    if missed is None:
        return f"{limits} is still kept at {best:.4g} {unit}, the greatest load that was allowed (--max-load)"
    return f"{limits} is kept up to {best:.4g} {unit}, missed at {missed:.4g}"


def show_latency(console: Console, document: Mapping[str, Any]) -> None:
    result = document["latency"]
    table = Table(title=f"latency of a batch of {result['batch_size']}, {result['iterations']} times")
    for name in ("", *STATS):
        table.add_column(name, justify="right")
    table.add_row("batch ms", *(_number(result["batch_ms"][stat]) for stat in STATS))
    console.print(table)
    console.print(f"output tokens/s {result['tokens_per_s']:.2f}", highlight=False)


def show_throughput(console: Console, document: Mapping[str, Any]) -> None:
    result = document["throughput"]
    table = Table(title=f"throughput of {result['requests']} requests", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name in ("duration_s", "prompt_tokens", "output_tokens", *RATES):
        table.add_row(_words(name), _number(result[name]))
    console.print(table)
    if cut := document["workload"]["cut"]:
        console.print(f"note: {_cut_note(cut)}", style="yellow", highlight=False)


def notes(document: Mapping[str, Any]) -> Iterator[str]:
    """What a reader of a `serve` document must know before believing it."""
    summary, workload = document["summary"], document["workload"]
    for kind, count in summary["failures"].items():
        yield f"{count} requests failed: {kind} ({document['failure_details'][kind]})"
    if workload["cut"]:
        yield _cut_note(workload["cut"])
    if workload["failed_warmups"]:
        yield f"{workload['failed_warmups']} warm-up requests failed"
    if summary["short_answers"]:
        yield f"{summary['short_answers']} answers are shorter than was asked"
    if not document["counts_tokens"]:
        yield "the server reports no token ids, so the tokens of an answer are spread evenly over its events"
    beyond = summary["cached_tokens"] - workload["reusable_tokens"]
    if beyond > REUSE_SLACK * summary["prompt_tokens"]:
        yield (
            f"{beyond} prompt tokens were cached before the run began (the server has seen this workload): "
            "use another --seed or an empty cache"
        )
    lag = summary["lag_ms"]
    if document["config"]["max_concurrency"] is None and lag and lag["p99"] > LATE_CLIENT_MS:
        yield f"the client was late: it sent {lag['p99']:.1f} ms after the due time at p99, which the latencies contain"


def compare(console: Console, new: Mapping[str, Any], old: Mapping[str, Any]) -> None:
    """Numbers of two documents of one kind side by side; every ratio is above 1 where the new one is better."""
    table = Table(title="compared with an earlier result")
    for name in ("", "earlier", "now", "ratio (>1 is better)"):
        table.add_column(name, justify="right" if name else "left")
    for label, before, now, ratio in ratios(new, old):
        table.add_row(label, _number(before), _number(now), f"{ratio:.3f}")
    console.print(table)
    ignored = {"json", "compare", "plot", "save_detailed"}
    names = [
        n for n in sorted({*new["config"], *old["config"]} - ignored) if new["config"].get(n) != old["config"].get(n)
    ]
    for name in names:
        shown = f"{old['config'].get(name)} then, {new['config'].get(name)} now"
        console.print(
            f"note: --{name.replace('_', '-')} differs: {shown}", style="yellow", highlight=False, markup=False
        )
    if new["client_host"] != old["client_host"]:
        console.print("note: the two were measured from different machines", style="yellow")


def ratios(new: Mapping[str, Any], old: Mapping[str, Any]) -> Iterator[tuple[str, float, float, float]]:
    """(label, earlier, now, ratio) of every number that both documents have above 0."""
    for label, path, more_is_better in _compared(new):
        now, before = _at(new, path), _at(old, path)
        if now and before:
            yield label, before, now, now / before if more_is_better else before / now


def _compared(document: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    kind = document["kind"]
    if kind == "slo":
        yield "greatest load", ("best",), True
    elif kind == "latency":
        yield from ((f"batch ms {stat}", ("latency", "batch_ms", stat), False) for stat in STATS)
    elif kind == "throughput":
        yield from ((_words(name), ("throughput", name), True) for name in RATES)
    elif kind == "kernels":
        yield from ((f"{name} ms", ("kernels", name, "step_ms"), False) for name in document["kernels"])
    else:
        yield from ((_words(name), ("summary", name), True) for name in RATES)
        for key, name in LATENCIES:
            yield from ((f"{name} ms {stat}", ("summary", key, stat), False) for stat in STATS)
        yield "goodput requests/s", ("summary", "goodput", "requests_per_s"), True
        yield "attainment", ("summary", "goodput", "attainment"), True


def _at(document: Any, path: tuple[str, ...]) -> float | None:
    for key in path:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document


def _counts(summary: Mapping[str, Any]) -> Table:
    table = Table(title="requests and tokens", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    names = ("completed", "failed", "duration_s", "prompt_tokens", "cached_tokens", "output_tokens", "offered_per_s")
    for name in (*names, *RATES, "peak_in_flight", "tokens_per_event"):
        table.add_row(_words(name), _number(summary[name]))
    return table


def _latencies(summary: Mapping[str, Any]) -> Table:
    table = Table(title="latency in ms")
    for name in ("", *STATS):
        table.add_column(name, justify="right" if name else "left")
    for key, label in (*LATENCIES, ("lag_ms", "client lag")):
        stats = summary[key] or dict.fromkeys(STATS)
        table.add_row(label, *(_number(stats[stat]) for stat in STATS))
    return table


def _goodput(goodput: Mapping[str, Any]) -> Table:
    table = Table(title="goodput")
    for name in ("limit", "attainment", "requests/s"):
        table.add_column(name, justify="right" if name != "limit" else "left")
    for name, limit in goodput["limits_ms"].items():
        table.add_row(f"{name} <= {limit:g} ms", f"{goodput['attainment_by_limit'][name]:.1%}", "")
    table.add_row("all", f"{goodput['attainment']:.1%}", _number(goodput["requests_per_s"]), style="bold")
    return table


def _show_server(console: Console, server: Mapping[str, Any]) -> None:
    if server["missing"] is not None:
        console.print(
            f"the server's own view is missing: {server['missing']}", style="yellow", highlight=False, markup=False
        )
        return
    table = Table(title="the server's own view")
    for name in ("", "unit", "server", "client", "client - server"):
        table.add_column(name, justify="right" if name not in ("", "unit") else "left")
    for row in server["rows"]:
        table.add_row(row["name"], row["unit"], *(_number(row[side]) for side in ("server", "client", "difference")))
    console.print(table)


def _verification(verification: Mapping[str, Any]) -> Table:
    table = Table(title="verification", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("answers checked against those computed offline", str(verification["checked"]))
    table.add_row(
        "answers that differ", str(verification["differ"]), style="bold red" if verification["differ"] else "bold"
    )
    if verification["begun"]:
        table.add_row("failed requests, checked as far as they came", str(verification["begun"]))
    if verification["unchecked"]:
        table.add_row("failed requests with nothing to check", str(verification["unchecked"]))
    return table


def _cut_note(cut: int) -> str:
    return f"{cut} requests were shortened to fit the model's length"


def _words(key: str) -> str:
    return key.replace("_per_s", "/s").replace("_", " ")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def import_pyplot() -> ModuleType:
    """Raises `ConfigError` naming what to install."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "--plot: matplotlib is not installed, which plots need: pip install matplotlib", "plot"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def plot_latencies(records: Sequence[ClientRecord], path: str | Path) -> None:
    """The cumulative distributions of TTFT, TPOT and E2E of the requests that completed. Raises `ConfigError`."""
    pyplot = import_pyplot()
    done = [record for record in records if record.error is None]
    figure, axes = pyplot.subplots(1, 3, figsize=(12, 4), sharey=True)
    for axis, name in zip(axes, ("ttft", "tpot", "e2e"), strict=True):
        seconds = sorted(value for record in done if (value := getattr(record, name)) is not None)
        axis.step(
            [value * 1e3 for value in seconds], [(i + 1) / len(seconds) for i in range(len(seconds))], where="post"
        )
        axis.set(xlabel=f"{name.upper()} (ms)", title=f"{len(seconds)} requests")
        axis.grid(visible=True, alpha=0.3)
    axes[0].set(ylabel="share of requests", ylim=(0, 1))
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot: {path} cannot be written ({error})", "plot") from error
    finally:
        pyplot.close(figure)
