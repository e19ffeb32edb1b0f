"""What is believed of an adopted server, which tells little of itself: what its prefix cache holds, how fast it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.device import DeviceModel, ModelShape
from penstock.core.plan import BLOCK_TOKENS
from penstock.sched.factors import FactorLearner

OVERHEAD = 5e-4  # seconds of a step, of which trials cannot tell what else takes them
RECENT = 0.1  # weight of the newest value in a mean
OVER = 0.05  # seconds, at least, over which the time of a step is measured: answers come in bursts


class BelievedCache:
    """The blocks that the server was sent and used last, as many as it has room for: what an LRU cache would hold if
    nobody else used it. Where others do, it holds less.

    Args:
        room: blocks; 0 where it keeps no prefixes.

    Attributes:
        sequence: of the changes that were taken last; see `CacheDelta`.
    """

    def __init__(self, room: int) -> None:
        self.sequence = 0
        self._room = room
        self._held: OrderedDict[bytes, None] = OrderedDict()  # the newest last
        self._changes: dict[bytes, bool] = {}  # key -> whether it has come; not taken yet

    def use(self, keys: Sequence[bytes]) -> None:
        """A sequence with these blocks was computed. Of one sequence the last blocks go first."""
        for key in reversed(keys):
            if key not in self._held:
                self._change(key, came=True)
            self._held[key] = None
            self._held.move_to_end(key)
        while len(self._held) > self._room:
            key, _ = self._held.popitem(last=False)
            self._change(key, came=False)

    def count(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks of a sequence it holds."""
        for number, key in enumerate(keys):
            if key not in self._held:
                return number
        return len(keys)

    def keys(self) -> list[bytes]:
        """All, of which no change is left to take."""
        self._changes.clear()
        return list(self._held)

    def take(self) -> tuple[list[bytes], list[bytes]] | None:
        """What has come and gone since the last time; None without any."""
        if not self._changes:
            return None
        self.sequence += 1
        changes, self._changes = self._changes, {}
        return [key for key, came in changes.items() if came], [key for key, came in changes.items() if not came]

    def _change(self, key: bytes, *, came: bool) -> None:
        if self._changes.pop(key, came) == came:  # else it is as it was
            self._changes[key] = came

    def check(self) -> None:
        """Raise AssertionError unless it holds no more than it has room for, and changes say what has changed."""
        assert len(self._held) <= self._room
        assert all(came == (key in self._held) for key, came in self._changes.items())


@dataclass(frozen=True, slots=True)
class Trial:
    """One request, alone: its prompt's tokens, seconds to the first token, and from one to the next."""

    tokens: int
    first: float
    interval: float


def device_of(shape: ModelShape, short: Trial, long: Trial) -> DeviceModel:
    """The device that a model seems to be on, as `engine.calibration` has it: a decode step reads all weights, and what
    a longer prompt takes longer is arithmetic. The network and the server's own work are in both."""
    interval = max(1e-6, (short.interval + long.interval) / 2)
    more = (long.first - short.first) / (long.tokens - short.tokens)
    each = max(1e-9, more if more > 0 else long.first / long.tokens)
    weights = shape.read_bytes(1) + shape.head_bytes
    overhead = min(OVERHEAD, interval / 2)
    return DeviceModel(
        peak_flops=2 * shape.active_params / each,
        bandwidth=weights / (interval - overhead),
        memory=shape.weight_bytes,
        overhead_ms=overhead * 1e3,
    )


class Pace:
    """How fast it is lately.

    Args:
        device, shape: None where its steps cannot be predicted.

    Attributes:
        ttft, tpot, interval: seconds, recent means; None before there is one.
    """

    def __init__(self, device: DeviceModel | None, shape: ModelShape | None) -> None:
        self.ttft: float | None = None
        self.tpot: float | None = None
        self.interval: float | None = None
        self._learner = None if device is None or shape is None else FactorLearner(device, shape)
        self._epoch, self._who, self._since, self._tokens = -1, "", 0.0, 0

    @property
    def factors(self) -> dict[str, float]:
        return {} if self._learner is None else self._learner.factors

    def begun(self, seconds: float) -> None:
        """A first token has come."""
        self.ttft = _mean(self.ttft, seconds)

    def ended(self, seconds: float) -> None:
        """A request had this mean time per token after the first."""
        self.tpot = _mean(self.tpot, seconds)

    def prefilled(self, seconds: float, tokens: int, cached: int, decodes: int, kv_tokens: int) -> None:
        """A first token came after this time, in which no other prompt was computed; beside so many that decoded."""
        if self._learner is not None:
            self._learner.observe([(tokens, cached)], decodes, kv_tokens, None, seconds * 1e3)

    def stepped(self, now: float, who: str, epoch: int, tokens: int, decodes: int, kv_tokens: int) -> None:
        """Tokens of a sequence have come, while so many decoded and no prompt was computed.

        Args:
            epoch: while it is the same, the same sequences decode; one of them is followed.
        """
        if epoch != self._epoch:
            self._epoch, self._who, self._since, self._tokens = epoch, who, now, 0
            return
        if who != self._who:
            return
        self._tokens += tokens
        if now - self._since >= OVER:
            seconds = (now - self._since) / self._tokens
            self._since, self._tokens = now, 0
            self.interval = _mean(self.interval, seconds)
            if self._learner is not None:
                self._learner.observe([], decodes, kv_tokens, None, seconds * 1e3)


def _mean(before: float | None, value: float) -> float:
    return value if before is None else before + RECENT * (value - before)


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)
