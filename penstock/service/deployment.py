"""A deployment: a model, the instances that run it, and how the clients reach them. `deployment_file` reads it from a
file, and knows which settings are compatible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.core.parallel import Layout
from penstock.core.service_level import Bounds
from penstock.service.supervisor import RestartPolicy

if TYPE_CHECKING:  # the first engine waits for what is imported here
    from penstock.core.wire.engine import Role

DEFAULT_POLICY = "unified"
LEASE = 5.0  # seconds of silence that end a hand-off, by default
ORPHANS = 60.0  # seconds that the blocks of a failed engine are kept, by default
WEIGHTS_PAIRS = {"cpu": "gloo", "cuda": "nccl"}  # what torch.distributed moves weights by, on each kind of device
ADOPTED = "vllm"  # device of groups that are running servers


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Instances that are alike.

    Attributes:
        count: that are started at first; data-parallel groups are instances each.
        options: every engine option that its kind of device has, by key; "device" among them.
        more: that can be started beside those.
        cpus: cores that are set apart for each, where its launcher does so.
        resources: what else is.
    """

    name: str
    count: int
    role: Role
    options: Mapping[str, Any]
    more: int = 0
    cpus: int = 1
    resources: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return str(self.options["device"])

    @property
    def modelled(self) -> bool:
        return kind_of(self.device) == "modelled"

    @property
    def adopted(self) -> bool:
        """Whether it is a running server of another kind."""
        return self.device == ADOPTED

    @property
    def shares_memory(self) -> bool:
        """Whether its KV blocks are in the host's memory, where other processes can reach them."""
        return not self.adopted and kind_of(self.device) != "cuda"

    @property
    def shares_weights(self) -> bool:
        """Whether its weights may come from a running instance, and are given to others."""
        return bool(self.weights_pair) or (kind_of(self.device) == "cpu" and self.options["peer_weights"] is True)

    @property
    def weights_pair(self) -> str:
        """The way by which they come through torch.distributed, the only one of GPUs; "" without it."""
        pair = WEIGHTS_PAIRS.get(kind_of(self.device), "")
        return pair if pair and self.options["peer_weights"] == pair else ""

    @property
    def gpus(self) -> Mapping[str, int]:
        """Those of this host that its instances are on, and how many are on each: data-parallel groups are on one after
        the other, and so are the ranks of each."""
        first = int(self.device.partition(":")[2] or 0)
        found: Counter[str] = Counter()
        for number in range(len(self.instances)):
            start = first + number % self.layout.data * self.ranks
            found.update(f"cuda:{start + rank}" for rank in range(self.ranks))
        return found

    @property
    def needs(self) -> dict[str, float]:
        """What is set apart for each, by the names that Ray has for it."""
        gpus = self.ranks if kind_of(self.device) == "cuda" else 0
        return {"CPU": self.cpus} | ({"GPU": gpus} if gpus else {}) | dict(self.resources)

    @property
    def layout(self) -> Layout:
        """Of the ranks that compute its model together. Raises ConfigError."""
        sizes = {way: self.options.get(f"{way}_parallel_size", 1) for way in ("tensor", "pipeline", "data")}
        return Layout(**sizes, experts=self.options.get("enable_expert_parallel", False))

    @property
    def ranks(self) -> int:
        """Processes that compute its model together."""
        return self.layout.group_size

    @property
    def instances(self) -> list[str]:
        """Their names."""
        return [f"{self.name}-{i}" for i in range(self.count + self.more)]

    @property
    def spares(self) -> list[str]:
        """Those of them that are not started at first."""
        return self.instances[self.count :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Transport:
    """How engines hand requests over to each other.

    Attributes:
        tls: PEM files for its links: certificate, key and ca; None without TLS.
        faults: injected faults; for tests.
    """

    kind: str
    tls: Mapping[str, str] | None
    faults: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How the hosts of a deployment reach one another.

    Attributes:
        host: IPv4 or IPv6 address of this one, where its master, engines and peer links listen.
        port: of the master.
        master: "host:port" of the one that this host's instances join; None when it is here.
        secret: that all hosts know; None only where nobody else can connect.
        registry: address of an etcd; None for a registry in the master.
        masters: how many run here, of which one leads; None for one, where the deployment is begun.
    """

    host: str
    port: int
    master: str | None
    secret: str | None
    registry: str | None
    masters: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ray:
    """The Ray cluster that runs the instances.

    Attributes:
        address: "HOST:PORT" of its head; None for the one that the environment or this host knows.
    """

    address: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How many instances may serve, for policies that start and stop them; more are like the first group's.

    Attributes:
        start_seconds: from the decision until one serves, as is believed until one was started.
        devices: that they may take together; None sets no such bound.
        interval: seconds between two decisions; None leaves it to the policy.
        cooldown_out, cooldown_in: seconds from one growth of a stage to the next, and from any change of it to a cut;
            likewise.
    """

    least: int
    most: int
    start_seconds: float
    devices: int | None
    interval: float | None
    cooldown_out: float | None
    cooldown_in: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Common:
    """What the files of all hosts have in common. With etcd the one that begins the deployment says it for all.

    Attributes:
        transport: kind of it.
    """

    model: str
    policy: str
    live_roles: bool
    priorities: Mapping[int, Bounds]
    scaling: Scaling | None
    transport: str
    lease: float
    media_route: str = "auto"

    def difference(self, other: Common) -> str:
        """What is not the same in `other`, both values of each thing; "" when all is. A model may be elsewhere on each
        host: the master compares checkpoints."""
        names = ("policy", "live_roles", "media_route", "priorities", "scaling", "transport", "lease")
        found = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return "; ".join(f"{name}: {mine!r} here, {theirs!r} there" for name, mine, theirs in found if mine != theirs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """Of one model. Several behind one endpoint have in common what concerns that and the host: frontends, server,
    restart, ray, warm_pool, and cluster but for its port.

    Attributes:
        prefix: of the names of its processes and their files, "" or "NAME/": a folder of its own.
        common: with other hosts, among what follows.
        frontends: processes of them; number i listens on port + i, or each on a free one when port is 0. 0 where the
            launcher's process is the frontend, and the master.
        server: every option of a frontend by its key, as `penstock serve` has them: host, port, drain_timeout, ...
        options: likewise those that are of the model: served_model_name, chat_template, ...
        policy: a name in `policies.BUNDLES`.
        live_roles: whether it changes roles, whatever the policy.
        media_route: which stages of requests with images are together, a `MediaRoute`; "auto" is as roles are.
        priorities: targets that each priority implies, for requests without any.
        lease: seconds of silence from the other side that end a hand-off.
        transport: None when no instance hands requests over.
        flight_recorder: file where the master writes what it decides, if anywhere.
        cluster: None when all of it is on one host, or on this one and on Ray's nodes.
        ray: None when the instances are processes of this host.
        scaling: None when the instances that serve are always the same.
        warm_pool: processes of this host that wait to become instances.
        orphans: seconds that the KV pool server keeps the blocks of a failed engine; None without such a server.
        warnings: about settings that are allowed but probably a mistake.
    """

    model: str
    common: Common
    frontends: int
    server: Mapping[str, Any]
    options: Mapping[str, Any]
    groups: tuple[Group, ...]
    policy: str
    lease: float
    transport: Transport | None
    orphans: float | None
    restart: RestartPolicy
    priorities: Mapping[int, Bounds] = field(default_factory=dict)
    prefix: str = ""
    live_roles: bool = False
    media_route: str = "auto"
    scaling: Scaling | None = None
    warm_pool: int = 0
    cluster: Cluster | None = None
    ray: Ray | None = None
    flight_recorder: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def secured(self) -> bool:
        """Whether links between its processes are authenticated and encrypted."""
        return self.ray is not None or (self.cluster is not None and self.cluster.secret is not None)

    @property
    def names(self) -> list[str]:
        """That clients may use for the model."""
        return list(self.options["served_model_name"] or (self.model,))

    @property
    def lone(self) -> bool:
        """Whether an engine is the only process beside the launcher's, and needs no name where that writes."""
        return not self.frontends and sum(len(group.instances) for group in self.groups) == 1


def kind_of(device: str) -> str:
    return device.partition(":")[0]
