"""Traffic in place of a scenario's trace, so that tests need no file."""

import numpy as np

from penstock.sim.workload import Workload
from penstock.workload.lengths import Independent, LogNormal, log_normal
from penstock.workload.requests import WorkRequest
from penstock.workload.synthetic import synthesise

# of the traces that the scenarios name: requests/s, coefficient of variation of the gaps, prompt and output (mean,
# standard deviation), and whether beginnings are shared
LIKE = {
    "azure2023_code.csv.gz": (2.6, 4.0, (2048, 1900), (28, 60), False),
    "azure2023_conv.csv.gz": (5.5, 1.1, (1155, 1100), (211, 160), False),
    "mooncake_conversation.jsonl.gz": (3.4, 1.0, (12_000, 14_000), (343, 300), True),
    "mooncake_synthetic.jsonl.gz": (3.9, 1.0, (15_000, 14_000), (149, 200), True),
    "servegen_mm-image_sampled.csv.gz": (9.7, 1.0, (482, 700), (100, 130), False),
}
IMAGES = {"servegen_mm-image_sampled.csv.gz": (1.45, 650, 0.5)}  # mean of a request, tokens of each and their deviation


def stand_in(workload: Workload, seconds: float = 200.0) -> list[WorkRequest] | None:
    """So many seconds of what is like the workload's trace, at its own rate; None without one."""
    if not workload.trace:
        return None
    images, tokens, deviation = IMAGES.get(workload.trace, (0.0, 1, 0.0))
    rate, cv, prompt, output, shared = LIKE[workload.trace]
    return synthesise(
        int(rate * seconds),
        Independent(log_normal(*prompt), log_normal(*output)),
        np.random.default_rng(0),
        rate=rate,
        cv=cv,
        prefixes=40 if shared else 0,
        prefix_tokens=4096,
        images=images,
        image_tokens=LogNormal(tokens, deviation) if images else None,
    )
