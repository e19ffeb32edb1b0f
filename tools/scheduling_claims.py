"""What papers claim, and what was measured beside it, for docs/scheduling.md. What was not measured is None.

Whatever is compared is compared over the seeds that both were measured with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.sim.svg import short
from tools.scheduling_results import Measured, Results

Here = Callable[[Results], "tuple[str, int] | None"]  # what was measured, and with how many seeds

LEAST_KEPT = 0.05  # a baseline that keeps less is beyond comparison: anything is many times that
DECODERS = 4  # beside the prompt machines that are counted
CODE, CONV = "roles-azure-code", "roles-azure-conv"
LATE, TIDAL = "colocation-azure-code", "colocation-tidal"
FOUR, TWO, APART, PRIORITY = "hfx-4task", "hfx-2task", "hfx-disaggregated", "hfx-priority"
CHATS, SYNTHETIC = "cache-mooncake-conversation", "cache-mooncake-synthetic"
SPLITS = ("least_loaded", *(f"least_loaded@split-{p}-{8 - p}" for p in (1, 2, 3, 5, 6, 7)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    Attributes:
        what: is compared with what.
        paper: what the paper reports.
        here: what was measured.
    """

    what: str
    paper: str
    here: Here


@dataclass(frozen=True, slots=True)
class Claim:
    """
    Attributes:
        key: of its part of the page.
        baselines: policies that others are shown as a multiple of.
        rated: the same for given rates: (field, baseline).
    """

    key: str
    scenarios: tuple[str, ...]
    baselines: tuple[str, ...]
    comparisons: tuple[Comparison, ...]
    rated: tuple[tuple[str, str], ...] = ()


# --- ways to compare


def found_rate(scenario: str, policy: str, *others: str) -> Here:
    """What a search makes great, against whichever of the others comes closest, all of which must have been measured.
    Each is compared over the seeds that both have. "NAME@*" is all of a policy's layouts of the scenario's own devices,
    of those that were measured."""

    def here(results: Results) -> tuple[str, int] | None:
        measured = results.search(scenario)
        if measured is None or not measured.figure(policy):
            return None
        layouts = [_layouts(results, measured, other) for other in others]
        if not all(any(measured.figure(variant) for variant in variants) for variants in layouts):
            return None
        found = measured.hardest(policy, [variant for variants in layouts for variant in variants])
        if found is None:
            return None
        which = f" of `{found.other}`" if len(others) > 1 or "@*" in others[0] else ""
        told = f"{times(found.ours, found.theirs)}: {short(found.ours)} against {short(found.theirs)}{which}"
        return told, len(found.both.seeds(policy))

    return here


def _layouts(results: Results, measured: Measured, wanted: str) -> list[str]:
    """Variants."""
    policy, _, layout = wanted.partition("@")
    return results.alike(measured, policy, policy) if layout == "*" else [wanted]


def most_kept(scenario: str, policy: str, other: str) -> Here:
    """The greatest ratio of attainments at any of the rates; and the least, if the other one is better there."""

    def here(results: Results) -> tuple[str, int] | None:
        pairs = list(_pairs(results, scenario, policy, other, "attainment"))
        known = [pair for pair in pairs if pair[2] >= LEAST_KEPT]
        if not known:
            return None
        low, high = (pick(known, key=lambda pair: pair[1] / pair[2]) for pick in (min, max))
        shown = [high, low] if low[1] < low[2] and low is not high else [high]
        told = [
            f"{times(ours, theirs)} at {short(r)}/s: {ours:.1%} against {theirs:.1%}" for r, ours, theirs, _ in shown
        ]
        few = f"{len(pairs) - len(known)} of {len(pairs)} rates"
        beyond = f" (left out: {few}, where that keeps under {LEAST_KEPT:.0%})" if len(known) < len(pairs) else ""
        return "; ".join(told) + beyond, min(pair[3] for pair in shown)

    return here


def least_latency(scenario: str, policy: str, other: str) -> Here:
    """The greatest cut of the mean latency at any of the rates; and the least, if the other one is faster there."""

    def here(results: Results) -> tuple[str, int] | None:
        pairs = [pair for pair in _pairs(results, scenario, policy, other, "mean_latency_s") if pair[2]]
        if not pairs:
            return None
        low, high = (pick(pairs, key=lambda pair: pair[1] / pair[2]) for pick in (min, max))
        shown = [low, high] if high[1] > high[2] and high is not low else [low]
        told = [
            f"{change(ours, theirs)} at {short(rate)}/s: {short(ours)} s against {short(theirs)} s"
            for rate, ours, theirs, _ in shown
        ]
        return "; ".join(told), min(pair[3] for pair in shown)

    return here


def over_rates(scenario: str, policy: str, other: str, field: str, told: Callable[[float, float], str]) -> Here:
    """From the lowest ratio to the highest over the rates."""

    def here(results: Results) -> tuple[str, int] | None:
        pairs = [pair for pair in _pairs(results, scenario, policy, other, field) if pair[2]]
        if not pairs:
            return None
        low, high = (pick(pairs, key=lambda pair: pair[1] / pair[2]) for pick in (min, max))
        seeds = min(pair[3] for pair in pairs)
        if len(pairs) == 1:
            return f"{told(*low[1:3])} at {short(low[0])}/s", seeds
        return f"{told(*low[1:3])} ({short(low[0])}/s) to {told(*high[1:3])} ({short(high[0])}/s)", seeds

    return here


def prompt_machines(scenario: str, policy: str, other: str) -> Here:
    """How few read prompts with a TTFT p95 no longer than the other's, for each number with which that one keeps its
    target."""

    def here(results: Results) -> tuple[str, int] | None:
        for measured in results.rated(scenario):
            counts = {v: results.prompt_machines(scenario, v, DECODERS) for v in measured.policies}
            same = measured.together([variant for variant, count in counts.items() if count is not None])
            for rate in same.rates:
                enough = [
                    (count, row["ttft_p95_ms"])
                    for count, row in _machines(results, same, other, rate)
                    if row["attainment"] >= same.document["target"]
                ]
                ours = _machines(results, same, policy, rate)
                if not enough or not ours:
                    continue
                told = []
                for most, ttft in sorted(enough):
                    few = min((count for count, row in ours if row["ttft_p95_ms"] <= ttft), default=None)
                    told.append(f"{most} to {few or f'more than {max(c for c, _ in ours)}'}")
                return f"{', '.join(told)} at {short(rate)}/s", len(same.document["seeds"])
        return None

    return here


def _machines(results: Results, measured: Measured, policy: str, rate: float) -> list[tuple[int, dict]]:
    """(machines, what they came to) for each layout of machines for prompts."""
    found = []
    for variant in measured.policies:
        count = results.prompt_machines(measured.scenario, variant, DECODERS)
        row = measured.at(variant, rate)
        if variant.partition("@")[0] == policy and count is not None and row.get("ttft_p95_ms"):
            found.append((count, dict(row)))
    return found


def _pairs(
    results: Results, scenario: str, policy: str, other: str, field: str
) -> Iterator[tuple[float, float, float, int]]:
    """(rate, of the policy, of the other one, seeds) where both are known."""
    for measured in results.rated(scenario):
        both = measured.together((policy, other))
        for rate in both.rates:
            ours, theirs = (both.at(variant, rate).get(field) for variant in (policy, other))
            if ours is not None and theirs is not None:
                yield rate, ours, theirs, len(both.document["seeds"])


def times(ours: float, theirs: float) -> str:
    return f"{ours / theirs:.2f}×"


def change(ours: float, theirs: float) -> str:
    return f"{ours / theirs - 1:+.0%}".replace("-", "−")


# --- what is claimed


def _models(
    what: str, paper: str, make: Callable[[str, str, str], Here], scenario: str, *pair: str
) -> list[Comparison]:
    """For both of HFX's models."""
    return [
        Comparison(f"{what}, {model}", paper, make(scenario, *(policy + layout for policy in pair)))
        for model, layout in (("Qwen-7B", ""), ("Qwen-32B", "@qwen-32b"))
    ]


def _mix(name: str, scenario: str, shown: Sequence[tuple[str, str, str]]) -> list[Comparison]:
    """Attainments: (policy, baseline, what the paper reports)."""
    return [
        comparison
        for policy, other, paper in shown
        for comparison in _models(
            f"{name}: attainment of `{policy}` over `{other}`", paper, most_kept, scenario, policy, other
        )
    ]


ROLES = Claim(
    "roles",
    (CODE, CONV),
    ("least_loaded",),
    (
        Comparison(
            "azure code: `xllm` over `least_loaded`, half and half", "1.67×", found_rate(CODE, "xllm", "least_loaded")
        ),
        Comparison(
            "azure conversation: `xllm` over `least_loaded`, half and half", "1.1×",
            found_rate(CONV, "xllm", "least_loaded"),
        ),
        *(
            Comparison(f"{name}: `{policy}` over the best static split", "", found_rate(scenario, policy, *SPLITS))
            for policy in ("xllm", "unified")
            for name, scenario in (("azure code", CODE), ("azure conversation", CONV))
        ),
    ),
)  # fmt: skip

COLOCATION = Claim(
    "colocation",
    (LATE, TIDAL),
    ("online_first", "separate"),
    (
        Comparison("azure code: `xllm` over `online_first`", "1.75×", found_rate(LATE, "xllm", "online_first")),
        Comparison("azure code: `xllm` over `separate`", "1.17×", found_rate(LATE, "xllm", "separate")),
        Comparison(
            "tidal: `xllm` over the better of both", "3×", found_rate(TIDAL, "xllm", "online_first", "separate")
        ),
        Comparison(
            "azure code: `unified` over both in their best layouts", "",
            found_rate(LATE, "unified", "online_first@*", "separate@*"),
        ),
        Comparison(
            "tidal: `unified` over both in their best layouts", "",
            found_rate(TIDAL, "unified", "online_first@*", "separate@*")
        ),
    ),
)  # fmt: skip

HFX = Claim(
    "hfx",
    (FOUR, TWO),
    ("round_robin", "scorpio"),
    (
        *_mix("4 tasks", FOUR, [
            ("hfx", "round_robin", "up to 2.60×"), ("hfx", "scorpio", "up to 1.73×"),
            ("hfx_scaling", "round_robin", "up to 4.44×"), ("hfx_scaling", "scorpio", "up to 2.59×"),
        ]),
        *_models("4 tasks: mean latency of `hfx_scaling` beside `scorpio`", "down to −65.8%", least_latency, FOUR,
                 "hfx_scaling", "scorpio"),
        *_mix("2 tasks", TWO, [
            ("hfx", "round_robin", "up to 1.23×"), ("hfx", "scorpio", "up to 2.14×"),
            ("hfx_scaling", "round_robin", "up to 1.5×"), ("hfx_scaling", "scorpio", "up to 2.93×"),
        ]),
        Comparison(
            "4 tasks: cost of `hfx_scaling` beside eight fixed instances", "",
            over_rates(FOUR, "hfx_scaling", "round_robin@eight", "instance_seconds", times),
        ),
        Comparison(
            "4 tasks: attainment of `hfx_scaling` over `round_robin` on eight fixed instances", "",
            most_kept(FOUR, "hfx_scaling", "round_robin@eight"),
        ),
    ),
    (("attainment", "round_robin"), ("attainment", "scorpio"), ("mean_latency_s", "scorpio"),
     ("instance_seconds", "round_robin")),
)  # fmt: skip

DISAGGREGATED = Claim(
    "hfx-disaggregated",
    (APART,),
    ("round_robin",),
    (
        Comparison("attainment of `hfx` over `round_robin`", "up to 2.54×", most_kept(APART, "hfx", "round_robin")),
        Comparison(
            "attainment of `hfx_scaling` over `round_robin`",
            "up to 2.54×",
            most_kept(APART, "hfx_scaling", "round_robin"),
        ),
        Comparison(
            "mean latency of `hfx` beside `round_robin`", "down to −31.8%", least_latency(APART, "hfx", "round_robin")
        ),
    ),
    (("attainment", "round_robin"), ("mean_latency_s", "round_robin"), ("instance_seconds", "round_robin")),
)

PRIORITIES = Claim(
    "hfx-priority",
    (PRIORITY,),
    ("round_robin",),
    (
        Comparison("attainment of `hfx` over `round_robin`", "up to 7.02×", most_kept(PRIORITY, "hfx", "round_robin")),
        Comparison("attainment of `unified` over `round_robin`", "", most_kept(PRIORITY, "unified", "round_robin")),
    ),
    (("attainment", "round_robin"), ("mean_latency_s", "round_robin")),
)

SINGLE = Claim(
    "hfx-single",
    ("hfx-single",),
    ("round_robin",),
    (
        Comparison(
            "`hfx` over the best of `aladdin`, `annealing` and `round_robin`", "no worse, by figure 8",
            found_rate("hfx-single", "hfx", "aladdin", "annealing", "round_robin"),
        ),
    ),
    (("attainment", "round_robin"),),
)  # fmt: skip

CACHE = Claim(
    "cache",
    (CHATS, SYNTHETIC),
    ("round_robin",),
    tuple(
        comparison
        for name, scenario in (("conversation", CHATS), ("synthetic", SYNTHETIC))
        for comparison in (
            Comparison(
                f"{name}: TTFT p95 of `rtp_llm` beside `round_robin`", "−35% to −37%",
                over_rates(scenario, "rtp_llm", "round_robin", "ttft_p95_ms", change),
            ),
            Comparison(
                f"{name}: tokens that `rtp_llm` reuses over `round_robin`", "3.15×",
                over_rates(scenario, "rtp_llm", "round_robin", "reused_tokens", times),
            ),
            Comparison(
                f"{name}: machines for prompts at an equal TTFT, from `round_robin` to `rtp_llm`", "80 to 20",
                prompt_machines(scenario, "rtp_llm", "round_robin"),
            ),
        )
    ),
    (("ttft_p95_ms", "round_robin"), ("reused_tokens", "round_robin")),
)  # fmt: skip

CLAIMS = (ROLES, COLOCATION, HFX, DISAGGREGATED, PRIORITIES, SINGLE, CACHE)
