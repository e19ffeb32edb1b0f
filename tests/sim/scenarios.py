"""Small scenarios for tests, as text and read."""

import random
from pathlib import Path
from textwrap import dedent

from penstock.cli.scenario_file import make_tables
from penstock.sched.local.policy.base import StepLimit
from penstock.sched.steptime import StepTime
from penstock.sim.scenario import InstanceGroup, Scenario, parse
from penstock.sim.simulate import simulate
from penstock.workload.requests import WorkRequest

# files of all scenarios that are kept
SCENARIOS = sorted((Path(__file__).parents[2] / "scenarios").glob("*.yaml"))
assert SCENARIOS

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
REQUESTS = 240  # of the workload that most tests take: four seconds
WORKLOAD = f"""
workload:
  synthetic: {{requests: {REQUESTS}, rate: 60, prompt: 700, prompt-cv: 0.8, output: 60,
    prefixes: 6, prefix-tokens: 256}}
  max-tokens: 600
slo: {{ttft-ms: 400, tpot-ms: 30}}
engine: {{max-model-len: 4096, max-num-seqs: 32, kv-blocks: 400, noise: 0.1}}
"""


def read(*parts: str) -> Scenario:
    return parse("test.yaml", "".join(dedent(part) for part in parts), make_tables())


def group(device: str, times: StepTime, count: int = 1, **changes) -> InstanceGroup:
    """Instances of llama-3.1-8b on such devices, by themselves."""
    sizes = {
        "num_blocks": 600,
        "token_budget": 2048,
        "limit": StepLimit.asked(None),
        "max_num_seqs": 128,
        "max_model_len": 8192,
    }
    rest = {"name": "engine", "role": "any", "noise": 0.0, "prefix_cache": True}
    model = {"device": f"modelled:{device}", "geometry": "llama-3.1-8b", "times": times}
    return InstanceGroup(count=count, **model | sizes | rest | changes)


def work(number: int, at: float = 0.0, prompt: int = 10, output: int = 5, prefix=(), block: int = 0) -> WorkRequest:
    return WorkRequest(
        number=number, at=at, prompt_tokens=prompt, output_tokens=output, prefix=prefix, block_tokens=block
    )


def run(scenario: Scenario, variant: str = "least_loaded", *, seed: int = 1, scale: float = 1.0, trace=None, **more):
    """The result, and the cluster after it, whose books were looked at."""
    return simulate(scenario, variant, trace, random.Random(seed), seed=seed, scale=scale, **more)
