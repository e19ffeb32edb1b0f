"""The deployment file: what it means, and one line for each mistake."""

import dataclasses
import re
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.deployment import TABLES
from penstock.core.errors import ConfigError
from penstock.engine.modelled import ModelledOptions
from penstock.service.deployment_file import parse, parse_all, registry_in
from penstock.service.policies import BUNDLES
from penstock.service.programs import way_of

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
RECIPES = [path for path in RECIPES if not path.stem.startswith("drill-")]  # those are of tests/drill
SMALLEST = "model: demo\ninstances:\n  - count: 2\n"
BOUNDS = "{priority: 3, ttft-ms: [100, 200], tpot-ms: [20, 20.5]}"


def read(text, **overrides):
    return parse("up.yaml", text, TABLES, overrides)


def mistakes(text, **overrides):
    with pytest.raises(ConfigError) as caught:
        read(text, **overrides)
    return str(caught.value).splitlines()


def test_the_smallest_file_takes_every_default():
    deployment = read(SMALLEST)
    (group,) = deployment.groups
    assert group.instances == ["engine-0", "engine-1"]
    assert (group.role, group.device, group.options["max_num_seqs"]) == ("any", "cpu", 128)
    assert deployment.names == ["demo"]
    assert deployment.server["port"] == 8000
    assert deployment.server["drain_timeout"] == 30
    assert (deployment.frontends, deployment.policy, deployment.priorities) == (1, "unified", {})
    assert group.options["scheduling_policy"] == "slack"
    assert deployment.transport.kind == "shared", "anybody may hand over to anybody"
    assert deployment.orphans == 60
    assert not deployment.warnings


def test_every_section():
    deployment = read(
        """
model: demo
served-model-name: [a, b]
host: 0.0.0.0
port: 7000
frontends: 2
api_key: secret
seed: 5
limits: {max-queued-requests: 9, drain-timeout: 3}
engine: {device: "modelled:h200", max-num-seqs: 7, noise: 0}
instances:
  - {role: prefill, count: 2, max-num-seqs: 8, enable-prefix-caching: no}
  - {name: writers, role: decode, kv-blocks: 64, geometry: qwen3-8b}
policy: round_robin
priorities: [{priority: 0, ttft-ms: [100, 200], tpot-ms: [20, 20]}]
transport:
  kind: tcp
  lease: 2.5
  faults: {drop: 0.5, only: [Push, Commit], partition: {after: 3}}
kv-pool: {orphans: 7}
restart: {backoff: 0.1, limit: 0, slow-after: 0}
"""
    )
    assert deployment.names == ["a", "b"]
    assert deployment.server["api_key"] == ("secret",)
    assert deployment.server["max_queued_requests"] == 9
    prefill, writers = deployment.groups
    assert prefill.instances == ["prefill-0", "prefill-1"]
    assert prefill.options["max_num_seqs"] == 8, "the group goes before what holds for all"
    assert prefill.options["enable_prefix_caching"] is False
    assert writers.instances == ["writers-0"]
    assert (writers.options["max_num_seqs"], writers.options["kv_blocks"]) == (7, 64)
    assert (deployment.transport.kind, deployment.lease) == ("tcp", 2.5)
    faults = {"drop": 0.5, "only": ("Push", "Commit"), "partition": {"after": 3, "for_s": None}}
    assert deployment.transport.faults == faults
    assert "on purpose" in deployment.warnings[0]
    assert (deployment.orphans, deployment.restart.backoff, deployment.restart.limit) == (7, 0.1, 0)
    assert deployment.restart.slow_after == 0, "never"


def test_priorities_are_worth_targets():
    (priority, bounds), *others = read(SMALLEST + f"priorities: [{BOUNDS}]").priorities.items()
    assert priority == 3
    assert (bounds.ttft.low, bounds.ttft.high, bounds.tpot.low, bounds.tpot.high) == (0.1, 0.2, 0.02, 0.0205)
    assert not others


def test_a_policy_says_what_is_linked_and_how_engines_pace_their_steps():
    def told(text):
        deployment = read(text)
        return deployment.policy, deployment.transport is not None, deployment.groups[0].options["scheduling_policy"]

    assert told(SMALLEST + "policy: hfx") == ("hfx", False, "fcfs")
    assert told(SMALLEST + "policy: unified") == ("unified", True, "slack")
    assert told("model: demo\ninstances: [{}]") == ("unified", False, "slack"), "one has nobody to hand over to"
    assert told("model: demo\ninstances: [{device: 'cuda:0'}, {name: b, device: 'cuda:1'}]") == (
        "unified",
        False,
        "slack",
    )
    assert told(SMALLEST + "engine: {scheduling-policy: fcfs}") == ("unified", True, "fcfs")
    roles = "model: demo\ninstances: [{role: prefill}, {role: decode, scheduling-policy: slack}]\n"
    assert told(roles) == ("unified", True, "slack")
    assert told(roles + "policy: least_loaded") == ("least_loaded", True, "fcfs")
    assert read(roles).groups[1].options["scheduling_policy"] == "slack"
    assert not read(roles).warnings
    assert [read(roles + more).live_roles for more in ("", "live-roles: true")] == [False, True]
    assert [read(roles + more).media_route for more in ("", "media-route: ED+P")] == ["auto", "ED+P"]


def test_what_ray_sets_apart_and_what_its_nodes_share():
    group = "    device: cuda\n    tensor-parallel-size: 2\n    cpus: 4\n    resources: {fast: 0.5}\n"
    deployment = read(SMALLEST + group + "launcher: ray")
    assert deployment.groups[0].needs == {"CPU": 4, "GPU": 2, "fast": 0.5}
    assert (deployment.ray.address, deployment.secured, deployment.orphans) == (None, True, None)
    deployment = read(SMALLEST + "launcher: ray\nray: {address: 10.0.0.1:6379}")
    assert deployment.groups[0].needs == {"CPU": 1}
    assert (deployment.ray.address, deployment.transport.kind, deployment.orphans) == ("10.0.0.1:6379", "tcp", None)
    assert not read(SMALLEST + "launcher: local").secured


ADOPTING = "model: demo\ninstances:\n  - {name: a, url: 'http://h:8001'}\n  - {name: b, url: 'http://h:8002'}\n"


def test_running_servers_become_instances():
    deployment = read(ADOPTING.replace("8002'", "8002', max-num-seqs: 7, served-model-name: m"))
    first, second = deployment.groups
    assert (first.instances, first.adopted, first.options["url"]) == (["a-0"], True, "http://h:8001")
    assert (second.options["max_num_seqs"], second.options["served_model_name"]) == (7, "m")
    assert (deployment.policy, deployment.transport, deployment.orphans) == ("unified", None, None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (ADOPTING.replace("http://h:8002", "h:8002"), "instances[1].url: 'h:8002', allowed is http://HOST:PORT or"),
        (ADOPTING.replace("8002'", "8002', count: 2"), "instances[1].count: '2', allowed beside url is 1"),
        (ADOPTING.replace("8002'", "8002', role: decode"), "instances[1].role: 'decode', allowed beside url is any"),
        (ADOPTING.replace("8002'", "8002', device: cpu"), "instances[1].device: 'cpu', allowed is nothing beside url"),
        (ADOPTING + "  - {name: c}\n", "instances[2]: group 'c', allowed is url in all groups or in none"),
        (ADOPTING + "launcher: ray\n", "instances[0].url: 'http://h:8001', allowed is nothing with launcher ray"),
        (ADOPTING + "warm-pool: 1\n", "warm-pool: '1', allowed with running servers is 0: there is nothing to import"),
        (ADOPTING + "kv-pool: {orphans: 3}\n", "kv-pool: a KV pool server holds blocks in the host's memory, and gr"),
        (SMALLEST + "    served-model-name: m\n", "instances[0].served-model-name: 'm', allowed only beside url"),
        (
            ADOPTING + "policy: unified_scaling\nscaling: {most: 3}\n",
            "scaling: given, allowed is nothing beside url: nobody starts those",
        ),
    ],
)
def test_what_a_running_server_cannot_be(text, says):
    assert any(says in line for line in mistakes(text)), mistakes(text)


def test_a_flag_goes_before_the_file():
    assert read(SMALLEST + "port: 7000\n", port=0).server["port"] == 0


def test_an_anchor_and_a_blank_value_are_fine():
    text = "model: demo\nseed:\nengine: &e {dtype: float32}\ninstances:\n  - *e\n  - {name: b, <<: 1}\n"
    assert mistakes(text)[0].startswith("up.yaml:6: instances[1].<<: no such setting")
    assert read(text.replace(", <<: 1", "")).groups[0].options["dtype"] == "float32"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "up.yaml:1: model: missing"),
        ("- 1", "up.yaml:1: a list, allowed are settings"),
        (SMALLEST + "port: 99999", "up.yaml:4: port: '99999', allowed is a whole number from 0 to 65535"),
        (SMALLEST + "port: [1, 2]", "up.yaml:4: port: a list, allowed is a whole number"),
        (SMALLEST + "host: [a, b]", "up.yaml:4: host: a list, allowed is one value"),
        (SMALLEST + "host: {a: b}", "up.yaml:4: host: a section, allowed is one value"),
        (SMALLEST + "prot: 1", "up.yaml:4: prot: no such setting, did you mean port?"),
        (SMALLEST + "zzz: 1", "up.yaml:4: zzz: no such setting, allowed are allow-credentials, "),
        (SMALLEST + "? [a]\n: 1", "up.yaml:4: ?: no such setting"),
        (
            SMALLEST + "max-num-seqs: 8",
            "up.yaml:4: max-num-seqs: no such setting here, allowed is max-num-seqs under eng",
        ),
        (
            SMALLEST + "drain-timeout: 8",
            "up.yaml:4: drain-timeout: no such setting here, allowed is drain-timeout under l",
        ),
        (SMALLEST + "engine: {geometry: qwen3-8b}", "up.yaml:4: engine.geometry: 'qwen3-8b', allowed is nothing with"),
        (SMALLEST + "seed: 1\nseed: 2", "up.yaml:5: seed: given twice, first in line 4"),
        (SMALLEST + "limits: 5", "up.yaml:4: limits: '5', allowed are settings"),
        (SMALLEST + "limits:\n  drain-timeout: soon", "up.yaml:5: limits.drain-timeout: 'soon', allowed is a whole"),
        (SMALLEST + "policy: best", "up.yaml:4: policy: 'best', allowed is round_robin, "),
        (
            SMALLEST + "policy: hfx_scaling",
            "up.yaml:4: policy: 'hfx_scaling', allowed only beside a section scaling",
        ),
        (SMALLEST + "priorities: {priority: 1}", "up.yaml:4: priorities: a section, allowed is a list"),
        (SMALLEST + "priorities: [{priority: 1, tpot-ms: [1, 2]}]", "up.yaml:4: priorities[0]: ttft-ms: missing"),
        (SMALLEST + "priorities: [{ttft-ms: 5}]", "up.yaml:4: priorities[0].ttft-ms: '5', allowed is [LOW, HIGH]"),
        (
            SMALLEST + "priorities: [{ttft-ms: [9, 5]}]",
            "up.yaml:4: priorities[0].ttft-ms: a list, allowed is [LOW, HIGH]",
        ),
        (
            SMALLEST + f"priorities:\n  - {BOUNDS}\n  - {BOUNDS}",
            "up.yaml:6: priorities[1].priority: 3, allowed is each priority once",
        ),
        (
            SMALLEST + "    max-num-seq: 1",
            "up.yaml:4: instances[0].max-num-seq: no such setting, did you mean max-num-s",
        ),
        (SMALLEST + "keeper: {orphans: 7}", "up.yaml:4: keeper: it is called kv-pool now"),
        (SMALLEST + "    pool: any", "up.yaml:4: instances[0].pool: it is called role now"),
        (SMALLEST + "    role: both", "up.yaml:4: instances[0].role: 'both', allowed is any, prefill, decode"),
        (
            SMALLEST + "    device: tpu",
            "up.yaml:4: instances[0].device: 'tpu', allowed is cpu, cuda, cuda:N, modelled:",
        ),
        (SMALLEST + "    noise: 0.1", "up.yaml:4: instances[0].noise: '0.1', allowed is nothing with device cpu"),
        (SMALLEST + "    name: Über", "up.yaml:4: instances[0].name: 'Über', allowed are up to 32 small letters"),
        (SMALLEST + "    name: master", "up.yaml:4: instances[0].name: 'master', allowed are"),
        (SMALLEST + "  - count: 1", "up.yaml:4: instances[1]: a second group called 'engine'"),
        (SMALLEST + "    role: decode", "up.yaml:4: instances[0].role: 'decode', allowed only beside"),
        (SMALLEST + "    role: prefill", "up.yaml:4: instances[0].role: 'prefill', allowed only beside"),
        (SMALLEST + "    role: encode", "up.yaml:4: instances[0].role: 'encode', allowed only beside"),
        (SMALLEST + "media-route: P+D", "up.yaml:4: media-route: 'P+D', allowed is auto"),
        (
            SMALLEST + "engine: {device: cuda}\nkv-pool: {}",
            "up.yaml:5: kv-pool: a KV pool server holds blocks in the host's",
        ),
        (SMALLEST + "    device: cuda", "up.yaml:4: instances[0].device: the shares of cuda:0 add up to 1.8"),
        (
            SMALLEST + "  - {name: b, device: 'modelled:h200'}",
            "up.yaml:4: instances[1].device: 'modelled:h200', allowed",
        ),
        (
            SMALLEST + "    dtype: float32\n  - {name: b, dtype: bfloat16}",
            "up.yaml:5: instances[1].dtype: 'bfloat16', allowed is 'float32' as in instances[0].dtype",
        ),
        (SMALLEST + "port: 65535\nfrontends: 3", "up.yaml:4: port: 65535, allowed is at most 65533"),
        (
            SMALLEST + "transport: {faults: {drop: 2}}",
            "up.yaml:4: transport.faults.drop: '2', allowed is a number from",
        ),
        (
            SMALLEST + "transport: {faults: {stall: Posh}}",
            "up.yaml:4: transport.faults.stall: 'Posh', allowed is Reserve",
        ),
        (
            SMALLEST + "transport: {kind: tcp, tls: {certificate: /nowhere}}",
            "up.yaml:4: transport.tls.certificate: '/nowhere', allowed is a file that is there",
        ),
        (
            SMALLEST + f"transport: {{kind: tcp, tls: {{certificate: {__file__}, ca: {__file__}}}}}",
            "up.yaml:4: transport.tls: key: missing, and there is no default",
        ),
        (
            SMALLEST
            + f"transport: {{kind: mooncake, tls: {{certificate: {__file__}, key: {__file__}, ca: {__file__}}}}}",
            "up.yaml:4: transport.tls: a section, allowed only with kind tcp, and this is mooncake",
        ),
        (
            SMALLEST + "cluster: {host: 10.0.0.7}",
            "up.yaml:4: cluster.host: '10.0.0.7', allowed without a secret is only 127.0.0.1 or ::1; set",
        ),
        (
            SMALLEST + "launcher: ray\nkv-pool: {}",
            "up.yaml:5: kv-pool: a section, allowed is nothing with launcher ray",
        ),
        (
            SMALLEST + "    device: cuda\nengine: {peer-weights: gloo}",
            "up.yaml:5: engine.peer-weights: 'gloo', allowed on cuda is nccl or false",
        ),
        (
            SMALLEST + "    device: cuda\nengine: {peer-weights: true}",
            "up.yaml:5: engine.peer-weights: 'true', allowed on cuda is nccl or false",
        ),
        (
            SMALLEST + "engine: {peer-weights: nccl}",
            "up.yaml:4: engine.peer-weights: 'nccl', allowed on cpu is true, gloo or false",
        ),
        (
            SMALLEST
            + "engine: {peer-weights: gloo}\n"
            + f"transport: {{kind: tcp, tls: {{certificate: {__file__}, key: {__file__}, ca: {__file__}}}}}",
            "up.yaml:4: engine.peer-weights: 'gloo', allowed with transport.tls on cpu is true or false: a process "
            "group sends in the clear",
        ),
        (
            SMALLEST + "engine: {peer-weights: maybe}",
            "up.yaml:4: engine.peer-weights: 'maybe', allowed is true, false, gloo or nccl",
        ),
        (
            SMALLEST + "launcher: ray\ntransport: {kind: shared}",
            "up.yaml:5: transport.kind: 'shared', allowed with launcher ray is tcp or mooncake: its nodes share no",
        ),
        (
            SMALLEST + "    device: cuda:1\nlauncher: ray",
            "up.yaml:4: instances[0].device: 'cuda:1', allowed with launcher ray is cuda: Ray chooses",
        ),
        (SMALLEST + "    cpus: 2", "up.yaml:4: instances[0].cpus: '2', allowed only with launcher ray"),
        (
            SMALLEST + "    device: modelled:h200\nwarm-pool: 2",
            "up.yaml:5: warm-pool: '2', allowed with modelled:h200 is 0: there is nothing to import",
        ),
        (
            SMALLEST + "    resources: {GPU: 1}",
            "up.yaml:4: instances[0].resources: a section, allowed is {NAME: AMOUNT",
        ),
        (SMALLEST + "ray: {address: a:1}", "up.yaml:4: ray: a section, allowed only with launcher ray"),
        (SMALLEST + "launcher: ray\nray: {address: ray://a:1}", "up.yaml:5: ray.address: 'ray://a:1', allowed is HOST"),
        (SMALLEST + "cluster: {host: 0.0.0.0}", "up.yaml:4: cluster.host: '0.0.0.0', allowed is an IPv4 or IPv6"),
        (SMALLEST + "cluster: {host: 'fe80::1%eth0'}", "up.yaml:4: cluster.host: 'fe80::1%eth0', allowed is an IPv4"),
        (SMALLEST + "cluster: {host: '[::1]'}", "up.yaml:4: cluster.host: '[::1]', allowed is an IPv4 or IPv6 address"),
        (
            SMALLEST + "cluster: {host: '2001:db8::a'}",
            "up.yaml:4: cluster.host: '2001:db8::a', allowed without a secret is only 127.0.0.1 or ::1",
        ),
        (
            SMALLEST + "cluster: {registry: 'etcd://::1:2379'}",
            "up.yaml:4: cluster.registry: 'etcd://::1:2379', allowed is etcd://",
        ),
        (SMALLEST + "cluster: {masters: 2}", "up.yaml:4: cluster.masters: 2, allowed without a registry is 1"),
        (SMALLEST + "cluster: {registry: etcd}", "up.yaml:4: cluster.registry: 'etcd', allowed is etcd://HOST"),
        (SMALLEST + "scaling: {most: 2}", "up.yaml:4: scaling: a section, allowed only with policy hfx_scaling"),
        (
            SMALLEST + "policy: hfx_scaling\nscaling: {most: 1}",
            "up.yaml:5: scaling.most: 1, allowed is at least the 2 that are started at first",
        ),
        ("model: /no/such\ninstances: [{}]", "up.yaml:1: model: '/no/such', allowed is a checkpoint folder"),
        ("model: demo\ninstances: {}", "up.yaml:2: instances: a section, allowed is a list"),
        ("model: demo\ninstances: []", "up.yaml:2: instances: empty"),
        ("model: [", "up.yaml:1: this is no YAML: "),
        ("model: demo\n\tx: 1", "up.yaml:2: this is no YAML: "),
        ("model: a\n---\nmodel: b", "up.yaml:2: this is no YAML: "),
        ("model: demo\nx: \x07", "up.yaml:2: this is no YAML: "),
        ("[" * 3000, "up.yaml:1: "),
    ],
)
def test_a_mistake_has_its_line_key_value_and_what_is_allowed(text, says):
    assert any(line.startswith(says) for line in mistakes(text)), mistakes(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            SMALLEST + "    kv-cache-memory: 900G",
            "up.yaml:4: instances[0].kv-cache-memory: 900.0 GiB for each of 2, 1800.0",
        ),
        (
            SMALLEST + "engine: {kv-cache-memory: 13G}",
            "up.yaml:4: engine.kv-cache-memory: 13.0 GiB for each of 2, 26.0",
        ),
        (
            "model: demo\ninstances:\n  - {device: cuda, host-cache-memory: 25G}\n",
            "up.yaml:3: instances[0].host-cache-memory: 25.0 GiB for each of 1, 25.0",
        ),
        (SMALLEST + "    kv-cache-memory: 12G", None),
        (SMALLEST + "    kv-cache-memory: 12G\n    tensor-parallel-size: 2", None),
        (
            SMALLEST + "    tensor-parallel-size: 2\n    kv-cache-memory: 13G",
            "up.yaml:5: instances[0].kv-cache-memory: 13.0 GiB for each of 2, 26.0",
        ),
        (SMALLEST + "    device: modelled:h200\n    kv-cache-memory: 100G", None),
    ],
)
def test_instances_fit_into_the_machine_together(text, says):
    read(text)  # nothing is known of the machine
    if says is None:
        parse("up.yaml", text, TABLES, memory=24 << 30)
        return
    with pytest.raises(ConfigError) as caught:
        parse("up.yaml", text, TABLES, memory=24 << 30)
    assert str(caught.value).startswith(says)
    assert str(caught.value).endswith("allowed is what this machine has, 24.0 GiB")


FIRST = """
model: demo
policy: xllm
priorities: [{priority: 1, ttft-ms: [100, 300], tpot-ms: [50, 70]}]
transport: {kind: mooncake, lease: 2}
cluster: {registry: "etcd://10.0.0.1:2379/x", secret: s}
"""
OTHER = "cluster: {registry: 'etcd://10.0.0.1:2379/x', secret: s}\ninstances: [{name: b, count: 2}]\n"


def test_what_all_hosts_have_in_common_is_said_once():
    first = read(FIRST)
    assert registry_in("up.yaml", OTHER + "modle: 3", TABLES) == first.cluster.registry == "etcd://10.0.0.1:2379/x"
    assert registry_in("up.yaml", SMALLEST, TABLES) is None
    assert msgspec.json.decode(msgspec.json.encode(first.common), type=type(first.common)) == first.common
    joined = parse("up.yaml", OTHER, TABLES, common=first.common)
    assert joined.common == first.common
    assert (joined.policy, joined.lease, joined.transport.kind) == ("xllm", 2, "mooncake")
    assert (joined.priorities, joined.live_roles) == (first.priorities, first.live_roles)
    assert joined.groups[0].options["scheduling_policy"] == BUNDLES["xllm"].local_policy
    same = OTHER + "policy: xllm\ntransport: {lease: 2, kind: mooncake}"
    assert not parse("up.yaml", same, TABLES, common=first.common).common.difference(first.common)
    other = OTHER + "policy: hfx\nlive-roles: true\ntransport: {kind: tcp}"
    difference = parse("up.yaml", other, TABLES, common=first.common).common.difference(first.common)
    live, kind = "live_roles: True here, False there", "transport: 'tcp' here, 'mooncake' there"
    assert difference == f"policy: 'hfx' here, 'xllm' there; {live}; {kind}"
    assert mistakes(OTHER) == ["up.yaml:1: model: missing, and there is no default"]


def test_a_host_that_joins_has_spare_instances_only_where_its_own_file_says_so():
    first = read(FIRST.replace("xllm", "hfx_scaling") + "instances: [{}]\nscaling: {most: 6}")
    assert len(first.groups[0].spares) == 5
    joined = parse("up.yaml", OTHER, TABLES, common=first.common)
    assert joined.scaling == first.scaling
    assert not joined.groups[0].spares


def test_all_mistakes_are_told_in_the_order_of_the_file():
    text = "model: demo\nport: x\ninstances:\n  - count: 0\n    dtype: int3\n  - role: decode\nrestart: {limt: 3}\n"
    assert [line.split(" ")[0] for line in mistakes(text)] == ["up.yaml:2:", "up.yaml:4:", "up.yaml:5:", "up.yaml:7:"]


words = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
trees = st.recursive(words, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=10)
sections = st.sampled_from(["instances", "limits", "transport", "engine", "kv-pool", "port", "model", "api-key"])


@given(st.dictionaries(sections, trees))
def test_whatever_stands_there_the_answer_is_a_deployment_or_lines(content):
    import yaml

    said = ""
    try:
        read(yaml.safe_dump(content, allow_unicode=True))
    except ConfigError as error:
        said = str(error)
    assert all(line.startswith("up.yaml:") for line in said.splitlines())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_are_in_order(recipe):
    for deployment in parse_all(recipe.name, recipe.read_text(), TABLES):
        assert deployment.server["port"] == 8000
        assert not deployment.warnings


def test_there_are_recipes():
    assert {path.stem for path in RECIPES} >= {"colocated", "disaggregated", "paced-16", "two-models"}


def test_a_modelled_engine_has_the_options_of_the_file_and_no_others():
    ours = {option.key.replace("enable_prefix_caching", "prefix_cache") for option in TABLES.modelled}
    theirs = {field.name for field in dataclasses.fields(ModelledOptions)}
    assert ours == theirs - {"model", "seed"}


# --- several models behind one endpoint

TWO = """
frontends: 2
models:
- {name: small, model: demo, instances: [{count: 2}]}
- {name: big, model: demo, served-model-name: [large, big], policy: round_robin, instances: [{name: e}]}
"""


def read_all(text, **more):
    return parse_all("up.yaml", text, TABLES, **more)


def test_each_model_is_a_deployment_of_its_own_behind_one_endpoint():
    small, big = read_all(TWO)
    assert [each.prefix for each in (small, big)] == ["small/", "big/"]
    assert [group.instances for group in (*small.groups, *big.groups)] == [
        ["small/engine-0", "small/engine-1"],
        ["big/e-0"],
    ]
    assert (small.names, big.names) == (["small"], ["large", "big"])
    assert (small.policy, big.policy) == ("unified", "round_robin")
    assert (small.server, small.frontends, small.restart) == (big.server, big.frontends, big.restart)
    assert small.server["port"] == 8000


def test_a_model_alone_is_an_entry_too_but_for_the_names_of_its_processes():
    inner = "model: demo, chat-template: x, kv-pool: {orphans: 3}, instances: [{}]"
    (one,) = read_all(f"models: [{{name: a, {inner}}}]")
    alone = read("\n".join(inner.split(", ")))
    assert replace(one, prefix="", groups=alone.groups, options=alone.options) == alone
    assert one.options == {**alone.options, "served_model_name": ("a",)}
    assert [replace(group, name=group.name.removeprefix("a/")) for group in one.groups] == list(alone.groups)


def test_masters_of_several_models_listen_on_ports_of_their_own():
    small, big = read_all(TWO + "cluster: {port: 7000}")
    assert (small.cluster.port, big.cluster.port) == (7000, 7001)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (TWO + "policy: unified", "policy: 'unified', allowed is policy in each entry of models"),
        (TWO + "instances: [{}]", "instances: a list, allowed is instances in each entry of models"),
        (TWO.replace("big, model", "small, model"), "models[1]: name: 'small' is another entry's too"),
        (TWO.replace("[large, big]", "small"), "models[1]: served-model-name: 'small' is another entry's too"),
        (TWO.replace("name: big", "name: Big"), "models[1].name: 'Big', allowed are up to 16 small letters"),
        (TWO.replace("name: big", "name: responses"), "models[1].name: 'responses', allowed are"),
        (TWO.replace("name: big, ", ""), "models[1]: name: missing, and there is no default"),
        (TWO.replace("model: demo, served", "port: 3, served"), "models[1].port: no such setting here"),
        (TWO.replace("model: demo, served", "served"), "models[1]: model: missing"),
        ("models: []", "models: 0 entries, allowed is a list of 1 to 64 models"),
        (TWO + "launcher: ray", "launcher: 'ray', allowed with several models is local"),
        (
            TWO + "cluster: {registry: 'etcd://10.0.0.1:2379/x', secret: s}",
            "registry: 'etcd://10.0.0.1:2379/x', allowed",
        ),
        (TWO + "cluster: {port: 65535}", "cluster: port: 65535, allowed is at most 65534"),
    ],
)
def test_what_is_wrong_with_several_models(text, complaint):
    with pytest.raises(ConfigError) as refused:
        read_all(text)
    assert complaint in str(refused.value)


def test_memory_is_asked_of_one_host_by_all_models():
    text = TWO.replace("instances", "engine: {device: cpu, kv-cache-memory: 4G}, instances")
    assert len(read_all(text, memory=12 << 30)) == 2
    with pytest.raises(ConfigError, match=re.escape("models[1].engine.kv-cache-memory: 4.0 GiB for each of 1, 12.0")):
        read_all(text, memory=11 << 30)
    shares = TWO.replace("instances", "engine: {device: cuda, gpu-memory-utilization: 0.4}, instances")
    with pytest.raises(ConfigError, match=r"shares of cuda:0 add up to 1\.2"):
        read_all(shares)


@pytest.mark.parametrize(
    "text", ["model: demo\npolicy: unified\n", "models: [{name: m, model: demo, policy: unified, "]
)
def test_another_model_and_policy_than_the_file_gives(text):
    text += "instances: [{}]" + ("}]" if "models" in text else "")
    (deployment,) = parse_all("up.yaml", text, TABLES, {"model": "b", "policy": "round_robin", "port": 9})
    assert (deployment.model, deployment.policy, deployment.server["port"]) == ("b", "round_robin", 9)
    assert "model" not in deployment.server


def test_where_one_model_is_wanted_several_are_refused():
    with pytest.raises(ConfigError, match=r"up\.yaml: models: 2 of them, allowed here is one"):
        read(TWO)


SHARING = "    data-parallel-size: 2\n    enable-expert-parallel: true\n"


def test_groups_are_instances_and_those_that_share_experts_start_together():
    (alone,), (sharing,) = (read(SMALLEST + more).groups for more in ("    data-parallel-size: 2\n", SHARING))
    names = ["engine-0", "engine-1", "engine-2", "engine-3"]
    assert alone.instances == sharing.instances == names
    assert not alone.layout.meets
    ways = [way_of(sharing, name, Path("/f")) for name in names]
    assert [way["data_parallel_rank"] for way in ways] == [0, 1, 0, 1]
    assert [way["data_parallel_address"] for way in ways] == ["/f/engine.groups-0"] * 2 + ["/f/engine.groups-1"] * 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("enable-sleep-mode: true", "up.yaml:6: enable-sleep-mode: true, allowed is false with data-parallel-size and"),
        ("launcher: ray", "up.yaml:4: instances[0].data-parallel-size: '2', allowed with data-parallel-size and"),
        (
            "policy: unified_scaling\nscaling: {most: 6}",
            "up.yaml:7: scaling: given, allowed is nothing with data-parallel-size",
        ),
    ],
)
def test_what_groups_that_share_experts_cannot_do_is_refused_by_name(more, says):
    with pytest.raises(ConfigError) as caught:
        read(SMALLEST + SHARING + more)
    assert str(caught.value).startswith(says)
