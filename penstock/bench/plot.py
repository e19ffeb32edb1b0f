"""Latency distributions as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from penstock.bench.record import RequestRecord
from penstock.core.errors import ConfigError


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


def plot_latencies(records: Sequence[RequestRecord], path: str | Path) -> None:
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
