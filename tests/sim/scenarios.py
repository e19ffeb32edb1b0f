"""Small scenarios for tests, as text and read."""

import random
from textwrap import dedent

from penstock.cli.scenario_file import make_tables
from penstock.sim.scenario import Scenario, parse
from penstock.sim.simulate import simulate

SPLIT = """
instances:
  - {role: prefill, count: 2}
  - {role: decode, count: 2}
"""
COLOCATED = """
instances:
  - {count: 3}
"""
ONE_LINE = """\
workload: {trace: t.csv}
slo: {ttft-ms: 1000, tpot-ms: 50}
engine: {device: modelled:h200}
instances: [{count: 2}]
"""
WORKLOAD = """
workload:
  synthetic: {requests: 300, rate: 60, prompt: 700, prompt-cv: 0.8, output: 60, prefixes: 6, prefix-tokens: 256}
  max-tokens: 600
slo: {ttft-ms: 400, tpot-ms: 30}
engine: {max-model-len: 4096, max-num-seqs: 32, kv-blocks: 400, noise: 0.1}
"""


def read(*parts: str) -> Scenario:
    return parse("test.yaml", "".join(dedent(part) for part in parts), make_tables())


def run(scenario: Scenario, variant: str = "least_loaded", *, seed: int = 1, scale: float = 1.0, trace=None, **more):
    """The result, and the cluster after it, whose books were looked at."""
    return simulate(scenario, variant, trace, random.Random(seed), seed=seed, scale=scale, **more)
