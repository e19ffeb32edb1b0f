"""The engine's process: python -m penstock.cli.engine JSON. Started by `penstock serve` and `up`, not by people.

JSON:
    name, address       of this instance; the ZMQ endpoint to bind
    public              {"address", "fd"}: one for other hosts, and a socket that it inherits; null for none
    secured             whether who connects has to know the deployment's secret, in PENSTOCK_CLUSTER_SECRET
    shown_as            its name in the log; "" where there is only one engine
    parent              process id; without that process this one ends
    role                "any", "prefill", "decode" or "encode": what the master means to place here
    options             fields of EngineOptions, or of ModelledOptions when the device starts with "modelled:"
    heartbeat           the heartbeat file, for hang detection; what the last step was of is in a file beside it
    seen                folder for what engines of this host make of images; null without
    kv_pool             the socket of the host's KV pool server; null for memory of its own
    weights             {"address", "sockets", "pair", "public"}: where it gives its weights, and where others of this
                        host do; pair is "gloo" or "nccl" where they come by torch.distributed too, else "";
                        public is null, or {"address", "givers", "joins", "tls", "mooncake"}: the same for other hosts,
                        the file of those of them that give any, whether its launcher has yet to hear of them, and
                        where they reach its Mooncake, "" without; null where it neither gives nor takes any
    transport           {"kind", "address", "tls", "faults"}: the transport to other engines; null for none, of no
                        meaning where blocks are on a CUDA device
    lease_s             seconds of silence after which a hand-off is over
    warm                whether all was imported before, as by `cli.warm`
    log_level, log_format

It ends on `Shutdown`, or when its parent has ended; also while it starts, or where it hangs.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.curve import curve_of
from penstock.cli.options import in_flags
from penstock.core.errors import ConfigError, RankFailed, Unavailable
from penstock.core.garbage import collect_rarely
from penstock.core.host_port import has_ipv6
from penstock.obs.logs import setup_logging
from penstock.obs.progress import byte_progress

if TYPE_CHECKING:
    from penstock.core.clock import Clock
    from penstock.core.device import DeviceModel
    from penstock.core.wire.engine import Ready
    from penstock.engine.build import Built
    from penstock.engine.modelled import BuiltModelled
    from penstock.engine.server import EngineServer
    from penstock.engine.weights import WeightManager
    from penstock.transfer.embedding_files import EmbeddingFiles
    from penstock.transfer.orphans import OrphanedBlocks
    from penstock.transfer.pool import OpenPool
    from penstock.transfer.transports import KVTransport

log = logging.getLogger("penstock.engine")
FROM_PEERS = ("nccl", "gloo", "map", "mooncake", "tcp")  # of `nn.loader.Source`
LOOK = 0.5  # seconds between two looks whether the parent process is there
ORPHANED = 5.0  # seconds that an engine has to end by itself when its parent has
GIVERS_WITHIN = 3.0  # seconds in which a launcher that joins hears from its master who gives weights
# Matrix kernels of so many shapes are kept. There is one for every number of rows, batches have any, and each takes up
# to megabytes: with the 1024 that torch keeps by itself, and oneDNN below it once more, an engine grows by a gigabyte
# in its first hour. Both read their variable at the first product.
KERNELS_KEPT = 16
KERNEL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
# Mooncake has its settings from the environment alone. A block that is being read from a peer that stands still is in
# quarantine until Mooncake gives up, which is after 30 s by default; so long it waits for a master too, and while a
# store begins nothing else in Python runs.
MOONCAKE = {
    "MC_RPC_CONNECT_TIMEOUT_MS": "2000",
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",
    "MC_LOG_LEVEL": "WARNING",
}
MOONCAKE_IPV6 = "MC_USE_IPV6"  # without it Mooncake knows none


def main(settings: dict[str, Any]) -> int:
    """Returns 0 when told to stop, 1 after a failure, 2 when the options cannot be served."""
    setup_logging(settings["log_level"], settings["log_format"], settings.get("shown_as", ""))
    threading.Thread(target=end_with, args=(settings["parent"],), name="parent", daemon=True).start()
    keep_few_kernels()
    preset_mooncake(meets_ipv6(settings))
    if (settings.get("weights") or {}).get("pair") == "nccl":
        preset_nccl()
    from penstock.core.clock import SystemClock
    from penstock.core.heartbeat import BlackBox, Heartbeat, box_of

    clock = SystemClock()
    incarnation = time.time_ns()
    with ExitStack() as stack:
        try:
            peers = weight_manager(settings, stack)
            built = build(settings, clock, open_pool(settings, incarnation), peers)
            if built.pool is not None:
                stack.callback(built.pool.close)
            stack.callback(built.engine.close)
            transport = open_way(settings, incarnation, built, stack)
            orphans = find_orphans(built, stack) if transport is not None else None
            seen = what_was_seen(settings, built, stack) if transport is not None else None
            ready = introduce(settings, incarnation, built, transport, peers)
        except ConfigError as error:
            if settings.get("shown_as"):  # in a deployment, whose file spells settings as they are
                log.error("%s", error)
            else:
                from penstock.cli.serve import OPTIONS

                print(f"penstock: {in_flags(error, OPTIONS)}", file=sys.stderr)
            return 2
        except (Unavailable, RankFailed) as error:
            log.error("%s", error)
            return 1
        server = stack.enter_context(closing(listen(settings, clock)))
        heartbeat = Heartbeat(Path(settings["heartbeat"]), ready.device)
        collect_rarely()
        try:
            server.run(
                built.engine,
                ready,
                orphaned=lambda: os.getppid() != settings["parent"],
                transport=transport,
                orphans=orphans,
                lease=settings.get("lease_s", 5.0),
                beat=heartbeat.beat,
                memory=built.memory,
                box=BlackBox(box_of(Path(settings["heartbeat"])), incarnation),
                seen=seen,
            )
        except RankFailed as error:
            log.error("the engine ends: %s", error)
            server.fail(str(error), broken=error.broken)
            return 1
        except Exception as error:
            log.exception("the engine failed")
            # what it has to do with beside requests may be gone
            server.fail(f"{type(error).__name__}: {error}", broken=not isinstance(error, Unavailable | OSError))
            return 1
    return 0


def end_with(parent: int) -> None:
    """Not to outlive it: a server that runs ends by itself, but one may be loading weights for minutes, or hang in a
    step. What this process has begun ends too, such as ranks and compilers."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    time.sleep(ORPHANED)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def keep_few_kernels() -> None:
    for variable in KERNEL_CACHES:
        os.environ.setdefault(variable, str(KERNELS_KEPT))


def listen(settings: dict[str, Any], clock: Clock) -> EngineServer:
    from penstock.engine.server import EngineServer

    public = settings.get("public")
    where = None if public is None else (public["address"], public["fd"])
    curve = curve_of(settings)
    return EngineServer(settings["address"], clock, where, None if curve is None else curve.listen)


def open_pool(settings: dict[str, Any], incarnation: int) -> OpenPool:
    from penstock.transfer.pool import memfd_pool, shared_pool

    kv_pool = settings.get("kv_pool")
    return memfd_pool if kv_pool is None else shared_pool(kv_pool, settings["name"], incarnation)


def weight_manager(settings: dict[str, Any], stack: ExitStack) -> WeightManager | None:
    """Closed at the end."""
    place = settings.get("weights")
    if place is None:
        return None
    from penstock.core.wire.rank import WeightSources
    from penstock.engine.weights import WeightManager

    own, sockets, pair, public = place["address"], place["sockets"], place["pair"], place["public"]
    if public is None:
        manager = WeightManager.of(WeightSources(own, sockets, pair=pair), [own])
    else:
        within, secret = GIVERS_WITHIN if public["joins"] else 0.0, os.environ.get("PENSTOCK_CLUSTER_SECRET")
        more = {"tls": public["tls"], "mooncake": public["mooncake"], "pair": pair, "public": public["address"]}
        told = WeightSources(own, sockets, public["givers"], within, secret, **more)
        manager = WeightManager.of(told, [own, public["address"]])
    stack.callback(manager.close)
    return manager


def build(
    settings: dict[str, Any], clock: Clock, pool: OpenPool, peers: WeightManager | None = None
) -> Built | BuiltModelled:
    options = settings["options"]
    if str(options.get("device")).startswith("modelled:"):
        from penstock.engine.modelled import ModelledOptions, build_modelled

        return build_modelled(ModelledOptions(**options), clock, pool)
    from penstock.engine.build import EngineOptions, build_engine

    if settings.get("shown_as"):  # a terminal has no room for the bars of several
        return build_engine(EngineOptions(**options), clock, pool, peers=peers)
    with byte_progress("weights") as progress:
        return build_engine(EngineOptions(**options), clock, pool, progress, peers)


def preset_mooncake(ipv6: bool = False) -> None:
    """For transport, weights and stores, before any of them imports it."""
    for variable, value in MOONCAKE.items():
        os.environ.setdefault(variable, value)
    if ipv6:
        os.environ.setdefault(MOONCAKE_IPV6, "1")


def preset_nccl() -> None:
    """Torch ends a process where another one of a group of its has ended, which is not to be the end of an engine whose
    weights somebody gets. That a rank has ended its engine notices by itself."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def meets_ipv6(settings: dict[str, Any]) -> bool:
    """Whether Mooncake is to reach, or to be reached at, an address of IPv6."""
    way, weights = settings.get("transport") or {}, (settings.get("weights") or {}).get("public") or {}
    places = [way["address"]] if way.get("kind") == "mooncake" else []
    places += [weights["address"]] if weights.get("mooncake") else []
    store, _, _ = (settings["options"].get("remote_cache") or "").partition("?")  # which may not be a URL at all
    places += [store] if store.lower().startswith("mooncake:") else []
    return any(map(has_ipv6, places))


def open_way(
    settings: dict[str, Any], incarnation: int, built: Built | BuiltModelled, stack: ExitStack
) -> KVTransport | None:
    """The transport to other engines, closed at the end; None without, and where blocks are on a CUDA device. Raises
    ConfigError where the role needs one."""
    way = settings.get("transport")
    if way is None:
        return None
    if built.pool is None:  # which device it is, where none is named, is known here first
        if (role := settings["role"]) != "any":
            raise ConfigError(f"role: {role!r}, on a CUDA device, which hands nothing over yet, allowed is any", "role")
        return None
    from penstock.transfer.transports import open_transport

    if way["kind"] == "mooncake" and "PENSTOCK_CLUSTER_SECRET" in os.environ:
        log.warning("Mooncake's own ports ask for no secret: the network has to keep others from them")
    transport = open_transport(
        way["kind"],
        way["address"],
        settings["name"],
        incarnation,
        built.layout,
        built.pool,
        way.get("faults"),
        secret=os.environ.get("PENSTOCK_CLUSTER_SECRET"),
        tls=way.get("tls"),
    )
    stack.callback(transport.close)
    return transport


def find_orphans(built: Built | BuiltModelled, stack: ExitStack) -> OrphanedBlocks | None:
    """What failed instances of this host leave, closed at the end; None without a KV pool server."""
    if built.pool is None or built.pool.client is None:
        return None
    from penstock.transfer.orphans import OrphanedBlocks

    orphans = OrphanedBlocks(built.pool)
    stack.callback(orphans.close)
    return orphans


def what_was_seen(settings: dict[str, Any], built: Built | BuiltModelled, stack: ExitStack) -> EmbeddingFiles | None:
    """What engines of this host, failed ones too, have made of images with the same weights; None for others."""
    from penstock.engine.modelled import BuiltModelled

    folder = settings.get("seen")
    if folder is None or isinstance(built, BuiltModelled) or built.worker.model.visual is None:
        return None
    from penstock.transfer.embedding_files import EmbeddingFiles

    dtype = str(built.worker.model.dtype).rpartition(".")[2]
    kind = f"{built.engine.scheduler.root.hex()}-{dtype}"
    seen = EmbeddingFiles(Path(folder) / kind, built.engine.media_bytes)
    stack.callback(seen.close)
    return seen


def introduce(
    settings: dict[str, Any],
    incarnation: int,
    built: Built | BuiltModelled,
    transport: KVTransport | None,
    peers: WeightManager | None = None,
) -> Ready:
    """What others are to know. From now on weights are given. Raises ConfigError."""
    from penstock.core.wire.engine import Peer, Ready
    from penstock.engine.modelled import BuiltModelled

    scheduler, loaded = built.engine.scheduler, None if isinstance(built, BuiltModelled) else built.worker.loaded
    device = (None if peers is None else peers.device) or device_model(built)
    weights_from: str = "" if loaded is None else loaded.source
    if settings.get("warm") and weights_from in FROM_PEERS:
        weights_from = "warm"
    return Ready(
        peer=Peer(settings["name"], incarnation, "" if transport is None else transport.address),
        role=settings.get("role", "any"),
        layout=built.layout,
        root_key=scheduler.root,
        max_model_len=scheduler.limits.max_model_len,
        vocab_size=built.runner.vocab_size,
        num_blocks=scheduler.kv.as_whole(scheduler.pool.num_blocks),
        search_blocks=scheduler.kv.kept_blocks(scheduler.pool.num_blocks),
        token_budget=scheduler.limits.token_budget,
        device=str(built.runner.device),
        dtype=built.layout.dtype,
        sampled_ids=sampled_ids(built),
        max_sequences=scheduler.limits.max_sequences,
        embedding_size=built.runner.embedding_size,
        generates=built.runner.generates,
        device_model=device,
        shape=built.shape,
        kv_pool="" if built.pool is None else built.pool.name,
        store=built.store,
        weights_from=weights_from,
        weights_seconds=0.0 if loaded is None else loaded.seconds,
        weights_at="" if peers is None else peers.serve(device),
        meets=meeting_place(settings["options"]),
    )


def meeting_place(options: Mapping[str, Any]) -> str:
    """Where an engine waits for other data-parallel groups in every step; "" where it does not."""
    return options.get("data_parallel_address") or "" if options.get("enable_expert_parallel") else ""


def device_model(built: Built | BuiltModelled) -> DeviceModel:
    from penstock.engine.modelled import BuiltModelled

    if isinstance(built, BuiltModelled):
        return built.device_model
    from penstock.cli.devices import known_device
    from penstock.core.clock import SystemClock
    from penstock.engine.calibration import calibrated

    device = built.runner.device
    if (known := known_device(device)) is not None:
        return known.parallel(built.worker.shard.size)
    return calibrated(built.trial(), device, built.shape, SystemClock())


def sampled_ids(built: Built | BuiltModelled) -> tuple[int, int] | None:
    from penstock.engine.modelled import BuiltModelled

    if not isinstance(built, BuiltModelled):
        return None
    ids = built.runner.token_ids
    return ids[0], ids[-1]


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
