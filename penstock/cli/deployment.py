"""What the settings of a deployment file may be, made of the same options as the flags of `penstock serve`."""

from __future__ import annotations

import contextlib
import json
import re
from math import inf
from pathlib import Path
from typing import get_args
from urllib.parse import urlsplit

from penstock.cli.options import Option, between, integer, number, one_of, size, switch, text, words
from penstock.cli.serve import ENGINE_OPTIONS, FLIGHT_RECORDER, OF_MODEL, SERVER_OPTIONS
from penstock.core.errors import ConfigError
from penstock.core.host_port import read_address, split_host_port
from penstock.core.wire.engine import MediaRoute, Role
from penstock.engine.poison import HOW, Poison
from penstock.sched.local import LOCAL_POLICIES
from penstock.sched.local.limits import DISK_GBPS, REMOTE_GBPS
from penstock.sched.steptime import DEVICES, GEOMETRIES
from penstock.service.checkpoint import find_checkpoint
from penstock.service.deployment import DEFAULT_POLICY, LEASE, ORPHANS, WEIGHTS_PAIRS
from penstock.service.etcd import read_etcd_address
from penstock.service.policies import BUNDLES
from penstock.service.tables import Tables
from penstock.transfer.faulty import MESSAGES

# of the server's options; the others stand at the top
LIMITS = (
    *("max-queued-requests", "max-queued-tokens", "drain-timeout", "send-timeout"),
    *("max-body-size", "max-file-size"),
)
MODELLED_TOO = (  # of the engine's options
    "device",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
    "step-time-limit-ms",
    "kv-cache-dtype",
    "kv-cache-memory",
    "host-cache-memory",
    "remote-cache",
    "enable-prefix-caching",
    "tail-key-interval",
    "speculative-config",
    "scheduling-policy",
)


def checkpoint(name: str) -> str:
    try:
        find_checkpoint(name)
    except ConfigError as error:
        raise ValueError(f"a checkpoint folder, a hub name, or demo ({error})") from None
    return name


def device(name: str) -> str:
    modelled = [f"modelled:{known}" for known in DEVICES]
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", name) and name not in modelled:
        raise ValueError(", ".join(("cpu", "cuda", "cuda:N", *modelled)))
    return name


def address(value: str) -> str:
    with contextlib.suppress(ValueError):
        return read_address(value)
    raise ValueError("an IPv4 or IPv6 address of this host, as the others reach it, without a zone")


def etcd(value: str) -> str:
    with contextlib.suppress(ValueError):
        read_etcd_address(value)
        return value
    raise ValueError("etcd://HOST:PORT,HOST:PORT,.../NAME")


def file(value: str) -> str:
    """Its path from the root: what reads it may run elsewhere."""
    if not Path(value).is_file():
        raise ValueError("a file that is there")
    return str(Path(value).resolve())


def poison(value: str) -> str:
    try:
        Poison.read(value)
    except ConfigError:
        raise ValueError(f"TOKEN:HOW, with HOW one of {', '.join(HOW)}") from None
    return value


def head(value: str) -> str:
    with contextlib.suppress(ValueError):
        split_host_port(value)
        return value
    raise ValueError("HOST:PORT of a Ray cluster's head, of which this machine is a node")


def resources(value: str) -> dict[str, float]:
    """A JSON object."""
    with contextlib.suppress(ValueError, AttributeError, TypeError):
        found = {str(name): float(amount) for name, amount in json.loads(value).items()}
        if all(0 < amount < inf for amount in found.values()) and not found.keys() & {"CPU", "GPU", ""}:
            return found
    raise ValueError("{NAME: AMOUNT, ...}, each above 0, and neither CPU nor GPU")


def http_url(value: str) -> str:
    with contextlib.suppress(ValueError):
        parts = urlsplit(value)
        if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return value
    raise ValueError("http://HOST:PORT or https://HOST:PORT")


def span(value: str) -> tuple[float, float]:
    """Two numbers, the lower one first."""
    with contextlib.suppress(ValueError):
        low, high = map(number(0), value.split(","))
        if low <= high:
            return low, high
    raise ValueError("[LOW, HIGH], both above 0")


def messages(value: str) -> tuple[str, ...]:
    return tuple(map(one_of(*MESSAGES), words(value)))


# not "where there is one", as for `penstock serve`: a file means the same on every machine
DEVICE = Option("device", device, "cpu", "what the instances run on")
SCHEDULING_POLICY = Option(
    "scheduling-policy",
    one_of(*LOCAL_POLICIES),
    None,
    "fcfs: by priority and arrival; slack: by targets of latency, priority and the work that is left; by default what "
    "the policy is made for",
)
OWN = {option.name: option for option in (DEVICE, SCHEDULING_POLICY)}


def peer_weights(value: str) -> bool | str:
    if value in WEIGHTS_PAIRS.values():
        return value
    try:
        return switch(value)
    except ValueError:
        raise ValueError(f"true, false, {' or '.join(WEIGHTS_PAIRS.values())}") from None


PEER_WEIGHTS = Option(
    "peer-weights",
    peer_weights,
    True,
    "take the weights of a running instance at a start: mapped on one host, else over TCP; gloo: by that first; "
    "nccl: on GPUs, which have no other way",
)
ENGINE = (*(OWN.get(option.name, option) for option in ENGINE_OPTIONS), PEER_WEIGHTS)
GROUP = (
    Option("name", text, None, "instances are called NAME-0, NAME-1, ...; by default engine, or as the role"),
    Option("count", integer(1, 1024), 1, "how many of this kind"),
    Option("role", one_of(*get_args(Role)), "any", "prefill, decode, encode (images alone) or any"),
)
TABLES = Tables(
    top=(
        Option("frontends", integer(1, 64), 1, "how many, each on a port of its own: port, port + 1, ..."),
        *(option for option in SERVER_OPTIONS if option.name not in LIMITS and option.key not in OF_MODEL),
        Option(
            "launcher",
            one_of("local", "ray"),
            "local",
            "what starts the instances: this command, here; or Ray, wherever it has room; needs penstock[ray]",
        ),
        Option(
            "warm-pool",
            integer(0, 64),
            0,
            "processes that have imported all and have no weights, of which one is taken when an instance starts",
        ),
    ),
    model=(
        Option("model", checkpoint, "", "a Hugging Face folder, a hub name, or demo"),
        *(option for option in SERVER_OPTIONS if option.key in OF_MODEL),
        FLIGHT_RECORDER,
        Option(
            "policy",
            one_of(*BUNDLES),
            None,
            f"what decides where requests run: {', '.join(BUNDLES)}; by default {DEFAULT_POLICY}",
        ),
        Option(
            "live-roles",
            switch,
            False,
            "roles change when prompts or tokens come too late, under any policy; under xllm and unified always",
        ),
        Option(
            "media-route",
            one_of("auto", *get_args(MediaRoute)),
            "auto",
            "which stages of requests with images are together: E+P+D encodes at instances of the role encode, EP+D "
            "where the prompt is prefilled, ED+P where it is to decode, EPD has all at one; auto: as roles are",
        ),
    ),
    models=(
        Option(
            "name",
            text,
            None,
            "begins the names of its processes, and is what clients call it without served-model-name",
        ),
    ),
    limits=[option for option in SERVER_OPTIONS if option.name in LIMITS],
    instances=(
        *GROUP,
        Option("cpus", integer(1), 1, "cores, and threads, of each instance, with launcher ray; GPUs are one a rank"),
        Option("resources", resources, {}, "of a Ray node that each takes: {NAME: AMOUNT, ...}", takes_object=True),
    ),
    priorities=(
        Option("priority", integer(-(1 << 31), (1 << 31) - 1), None, "of requests; lower runs first"),
        Option("ttft-ms", span, None, "bounds of its TTFT target, [LOW, HIGH]"),
        Option("tpot-ms", span, None, "bounds of its TPOT target, [LOW, HIGH]"),
    ),
    engine=ENGINE,
    modelled=(
        *(option for option in ENGINE if option.name in MODELLED_TOO),
        Option("geometry", one_of(*GEOMETRIES), None, "the model whose times are modelled; by default the model's own"),
        Option("slowdown", between(1, 1e6), 1.0, "factor on all times, for a host that cannot keep up"),
        Option("noise", between(0, 1), 0.0, "standard deviation of a step's time, relative to it"),
        Option("disk-cache-size", size, None, "of a KV tier on a disk of each instance, such as 1T; empty at a start"),
        Option("disk-cache-gbps", number(0, 1e6), DISK_GBPS, "gigabits per second from there, and there"),
        Option("remote-cache-gbps", number(0, 1e6), REMOTE_GBPS, "the same of remote-cache, for each instance"),
        Option("poison", poison, None, "TOKEN:HOW: a step that computes this token breaks the engine; for drills"),
        Option(
            "kv-blocks",
            integer(1, 1 << 28),
            None,
            "of 64 tokens, in one group of layers; by default what the modelled device has room for",
        ),
    ),
    adopted=(
        Option("url", http_url, None, "a running vLLM server becomes an instance; see [above](#adopted-servers)"),
        Option("served-model-name", text, None, "what that server calls the model; by default the first it lists"),
        Option("max-num-seqs", integer(1, 65536), 256, "what that server was started with"),
        Option("max-num-batched-tokens", integer(1), 2048, "the same"),
        Option("kv-blocks", integer(1, 1 << 28), None, "of 64 tokens; by default what its /metrics say"),
    ),
    transport=(
        Option(
            "kind",
            one_of("shared", "tcp", "mooncake"),
            "shared",
            "shared: blocks change their holder; tcp: they are copied; mooncake: the same by its transfer engine, "
            "which needs penstock[mooncake]",
        ),
        Option("lease", number(0, 3600), LEASE, "seconds of silence that end a hand-off"),
    ),
    tls=(
        Option("certificate", file, None, "PEM file of this host's, as client and as server"),
        Option("key", file, None, "PEM file of its key, without a passphrase"),
        Option("ca", file, None, "PEM file of the CA that has signed those of all hosts, and no others"),
    ),
    faults=(
        Option("seed", integer(0), 0, "seed of the faults"),
        Option("delay-ms", between(0, 60_000), 0.0, "delay of every frame"),
        *(
            Option(name, between(0, 1), 0.0, "probability, for each frame")
            for name in ("drop", "duplicate", "reorder", "corrupt")
        ),
        Option("only", messages, (), "messages that the above is for; by default all"),
        Option("stall", messages, (), "messages of which each request's first is never sent"),
    ),
    partition=(
        Option("after", integer(0), 0, "frames that pass before the partition"),
        Option("for-s", number(0), None, "seconds that it lasts; by default for ever"),
    ),
    scaling=(
        Option("least", integer(1, 4096), 1, "instances that serve"),
        Option(
            "most", integer(1, 4096), 1, "that run, start or drain; those beyond the groups are like the first one's"
        ),
        Option("devices", integer(1), None, "that all of them may take, an instance one for each rank; by default any"),
        Option(
            "start-seconds", between(0, 86_400), 30.0, "from the decision until one serves, until that was measured"
        ),
        Option("interval", number(0, 86_400), None, "seconds between decisions; by default the policy's"),
        Option("cooldown-out", between(0, 86_400), None, "seconds between growths of a stage; by default the policy's"),
        Option("cooldown-in", between(0, 86_400), None, "from a stage's change to a cut; by default the policy's"),
    ),
    cluster=(
        Option("host", address, "127.0.0.1", "address of this host, at which master, engines and peer links listen"),
        Option("port", integer(1, 65535), 7600, "of the master, for the instances and frontends of other hosts"),
        Option("master", text, None, "HOST:PORT of the master that this host's instances join, for `penstock join`"),
        Option("secret", text, None, "known to all hosts of the deployment; by default PENSTOCK_CLUSTER_SECRET"),
        Option(
            "registry", etcd, None, "etcd://HOST:PORT,HOST:PORT,.../NAME, of all hosts; by default the master is it"
        ),
        Option(
            "masters",
            integer(1, 8),
            None,
            "on ports from port on; of those on all hosts one leads and the others stand by; by default 1, and with "
            "penstock join none",
        ),
    ),
    ray=(
        Option(
            "address",
            head,
            None,
            "HOST:PORT of its head; by default RAY_ADDRESS, or the cluster that this machine is a node of",
        ),
    ),
    kv_pool=(Option("orphans", number(0), ORPHANS, "seconds that it keeps the blocks of a failed engine"),),
    restart=(
        Option("backoff", number(0, 3600), 0.5, "seconds until a failed process is restarted; doubles each time"),
        Option(
            "limit",
            integer(0),
            5,
            "failures in a row that are restarted; then an engine is given up, any other process ends all",
        ),
        Option(
            "heartbeat-timeout",
            between(1, 3600),
            5.0,
            "seconds without a sign of life after which a process is killed and restarted",
        ),
        Option(
            "slow-after",
            between(0, 86_400),
            60.0,
            "seconds of work after which a slow engine is drained and restarted; 0 for never",
        ),
    ),
)
