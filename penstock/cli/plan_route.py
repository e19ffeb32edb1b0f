"""`penstock plan --objective images`: which stages of requests with images are together, and how many instances each
role has, by the profiler that a running deployment has (`sched.cluster.epd_profiler`)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from pathlib import Path
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any

from penstock.cli.output import as_json
from penstock.core.errors import ConfigError

if TYPE_CHECKING:
    from penstock.cli.plan_report import Problem
    from penstock.sched.cluster.epd_profiler import Profile
    from penstock.sched.cluster.media_stages import MediaRequest
    from penstock.sim.plan import Kind

SHOWN = 8  # layouts


def choose(problem: Problem, kind: Kind, count: int, out: Any) -> int:
    """Show and write what was found; 1 when no layout carries the rate that is asked for. Raises ConfigError.

    Args:
        kind: of every instance; `count`: of them.
    """
    from rich.console import Console

    group = kind.group
    if group.times.shape.vision is None:
        raise ConfigError(f"--geometry: {group.geometry} sees nothing, needed is one with a vision tower", "geometry")
    traffic = _traffic(problem)
    if count < 2:
        raise ConfigError(f"--devices: {count}, needed are two at least to be apart", "devices")
    images = sum(len(r.images) for r in traffic) / len(traffic)
    if not images:
        raise ConfigError("--trace: its requests have no images", "trace")
    found = _found(problem, kind, count, traffic)
    console = Console()
    console.print(f"{count} {kind.name}, {images:.2g} images to look at per request; requests/s within targets:")
    rates = {layout: factor * problem.rate for layout, factor in found.tried.items()}
    for layout, rate in sorted(rates.items(), key=lambda item: (item[0] != found.layout, -item[1]))[:SHOWN]:
        mark = "" if layout == found.layout else "at most " if rate <= rates[found.layout] else "estimated "
        console.print(f"  {layout.title:<16}{mark}{rate:.3g}", highlight=False)
    carried = rates[found.layout]
    console.print(f"Best is {found.layout.title}: media-route {found.layout.route}.", highlight=False)
    if out is not None:
        layouts = [{**layout._asdict(), "title": layout.title, "rate": rate} for layout, rate in rates.items()]
        content = {"winner": found.layout.title, "rate": carried, "asked": problem.rate, "layouts": layouts}
        Path(out).write_text(as_json(content), encoding="utf-8")
    return 0 if carried >= problem.rate else 1


def _traffic(problem: Problem) -> Sequence[MediaRequest]:
    """The first online requests, whose images all are to be looked at, but for those that came before."""
    from penstock.sched.cluster.epd_profiler import WINDOW
    from penstock.sched.cluster.media_stages import MediaRequest

    traffic, known = [], set()
    longest = problem.scenario.workload.max_tokens
    for work in [r for r in problem.requests if not r.offline][:WINDOW]:
        new = tuple(image.tokens for image in work.images if image.number not in known)
        seen = sum(image.tokens for image in work.images) - sum(new)
        known |= {image.number for image in work.images}
        text = max(1, work.prompt_tokens - sum(new) - seen)
        traffic.append(MediaRequest(work.at, text, new, max(1, min(work.output_tokens, longest)), seen))
    if not traffic:
        raise ConfigError("--scenario: it has no online requests, and only those have targets", "scenario")
    return [r._replace(at=r.at - traffic[0].at) for r in traffic]


def _found(problem: Problem, kind: Kind, count: int, traffic: Sequence[MediaRequest]) -> Profile:
    from penstock.sched.cluster.base import InstanceLoad
    from penstock.sched.cluster.epd_profiler import machine_of, search
    from penstock.sched.cluster.media_stages import Targets, layouts

    group = kind.group
    load = InstanceLoad(
        name=kind.name, times=group.times, token_budget=group.token_budget, max_sequences=group.max_num_seqs
    )
    machine = machine_of([load], round(fmean(tokens for r in traffic for tokens in r.images)))
    assert machine is not None
    online = [r for r in problem.requests if not r.offline]
    targets = Targets(median_low(r.ttft for r in online), median_low(r.tpot for r in online), problem.target)
    if min(targets.ttft, targets.tpot) == inf:
        raise ConfigError("--ttft-ms: needed, without targets every layout carries everything", "ttft-ms")
    work = search(machine, traffic, targets, layouts(count))
    while True:
        try:
            next(work)
        except StopIteration as ended:
            profile: Profile = ended.value
            return profile
