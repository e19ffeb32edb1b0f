"""Who looks at the images of a request, and who has what came of those that were looked at before: what the master
decides of encoding (xLLM, section 3.3)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from penstock.core.wire.engine import CacheDelta, ImageSource, MediaRoute
from penstock.core.wire.master import PlacedImage
from penstock.kv.index import DEVICE, ClusterIndex
from penstock.sched.cluster import Demand
from penstock.sched.cluster.base import ImageWay, Key
from penstock.service.mesh import may_fetch
from penstock.service.session import InstanceSession, Roster

PATIENCE, GRACE_MS = 4.0, 2000.0  # what was predicted may take so many times that, and so long more
UNKNOWN_MS = 10_000.0  # where nobody has measured how long an image takes
MB_MS = 1.0  # that a million bytes of embeddings take, as long as an instance has not measured it
ROUND_TRIPS_MS = 1.0
NUMBER_BYTES = 4

_How = Literal["looks", "looked"]
_LOOKS: _How = "looks"
_LOOKED: _How = "looked"


class ImagePlaces:
    """
    Args:
        sessions: that serve now, by name; kept by the owner, as is their `roster`.
        route: which stages are together; None is "E+P+D" while there are instances of the role "encode".

    Attributes:
        route: may be changed at any time: it is about requests that are placed from then on.
    """

    def __init__(
        self, sessions: Mapping[str, InstanceSession], roster: Roster, route: MediaRoute | None = None
    ) -> None:
        self.route = route
        self._sessions, self._roster = sessions, roster
        self._index = ClusterIndex()
        # what each is to look at, until it has; and whether others can have it from there
        self._ordered: dict[Key, list[tuple[str, PlacedImage, bool]]] = {}

    # --- what instances have

    def apply(self, name: str, delta: CacheDelta) -> bool:
        """Digests that came and went in an instance's memory; False as of `ClusterIndex.apply`."""
        return self._index.apply(name, replace(delta, tier=DEVICE))

    def forget(self, name: str) -> None:
        """An instance was lost."""
        self._index.forget(name)

    def with_images(self, now: float, demand: Demand, images: Sequence[PlacedImage]) -> Demand:
        """Let policies know when what is seen in a request's images could be at each instance that may prefill it."""
        if not images:
            return demand
        able = self._roster.able(now)
        holders = {image.digest: self._holders(image, now) for image in images}
        there = Counter(name for image in images for name in holders[image.digest])
        return replace(
            demand,
            image_tokens=sum(image.tokens for image in images),
            images_in={s.name: self._seconds(now, s, images, holders) for s in able},
            images_at=dict(there),
        )

    def _seconds(
        self,
        now: float,
        session: InstanceSession,
        images: Iterable[PlacedImage],
        holders: Mapping[bytes, Mapping[str, InstanceSession]],
    ) -> float:
        """Until all of them are seen, where this instance prefills: it is predicted as it would be done."""
        encoder = self._encoder(now, session, session)
        at, others = encoder or session, 0.0
        own = at.encoding_tokens * (at.encode_ms or 0.0)
        for image in images:
            if session.name in holders[image.digest]:
                continue
            looked = image.tokens * (at.encode_ms or 0.0)
            if holders[image.digest] and (encoder is not None or self._pays(session, image)):
                others = max(others, _travel_ms(session, image))
            else:
                own += looked
        return max(own, others) / 1e3

    def unseen(self, now: float, images: Sequence[PlacedImage]) -> tuple[list[int], int]:
        """Tokens of each that nobody has looked at, and of all others together."""
        new = [image.tokens for image in images if not self._holders(image, now)]
        return new, sum(image.tokens for image in images) - sum(new)

    def named_route(self, now: float) -> MediaRoute:
        """As requests with images go now."""
        return self.route or ("E+P+D" if self._roster.encoders(now) else "EP+D")

    # --- who looks at them

    def sources(
        self, now: float, key: Key, images: Sequence[PlacedImage], prefiller: InstanceSession, home: InstanceSession
    ) -> list[ImageSource]:
        """From whom who prefills gets what is seen in each image; it looks itself at those that are not named.

        Args:
            home: who decodes, as far as that is known.
        """
        self.seen(key)
        encoder = self._encoder(now, prefiller, home) if prefiller.peer.address else None
        found: list[ImageSource] = []
        for image in images:
            holders = self._holders(image, now)
            if prefiller.name in holders:
                continue
            holders = {n: s for n, s in holders.items() if prefiller.peer.address and may_fetch(prefiller, s)}
            if holders and (encoder is not None or self._pays(prefiller, image)):
                holder = min(holders.values(), key=lambda s: (s is not encoder, s.encoding_tokens, s.name))
                wait = self._wait_ms(holder) if self._is_coming(holder, image) else GRACE_MS
                wait += PATIENCE * _travel_ms(prefiller, image)
                found.append(ImageSource(image.digest, holder.peer, False, wait))
            elif encoder is not None:
                self._index.expect(encoder.name, [image.digest])
                self._order(key, encoder, image, shared=True)
                found.append(ImageSource(image.digest, encoder.peer, True, self._wait_ms(encoder)))
            else:
                self._order(key, prefiller, image, shared=False)
        return found

    def _order(self, key: Key, session: InstanceSession, image: PlacedImage, *, shared: bool) -> None:
        session.encode(key, image.tokens)
        self._ordered.setdefault(key, []).append((session.name, image, shared))

    def ways(
        self, key: Key, images: Sequence[PlacedImage], prefiller: InstanceSession, sources: Sequence[ImageSource]
    ) -> list[ImageWay]:
        """The same in short, for those who ask why."""
        by_digest = {source.digest: source for source in sources}
        own = {image.digest for name, image, _ in self._ordered.get(key, ()) if name == prefiller.name}
        totals: dict[tuple[str, _How], tuple[int, int]] = {}
        for image in images:
            source = by_digest.get(image.digest)
            at = prefiller.name if source is None else source.peer.name
            looks = image.digest in own if source is None else source.encodes
            place = at, _LOOKS if looks else _LOOKED
            count, tokens = totals.get(place, (0, 0))
            totals[place] = count + 1, tokens + image.tokens
        return [ImageWay(at, how, *total) for (at, how), total in totals.items()]

    def seen(self, key: Key) -> None:
        """Nobody is to look at a request's images any more: it has its first token, has ended, or goes elsewhere."""
        for name, image, shared in self._ordered.pop(key, ()):
            if shared:
                self._index.unexpect(name, [image.digest])
            if (session := self._sessions.get(name)) is not None:
                session.encoded(key)

    def _encoder(self, now: float, prefiller: InstanceSession, home: InstanceSession) -> InstanceSession | None:
        """Who looks at images for this prefiller; None where it does so itself."""
        others: list[InstanceSession] = []
        if (route := self.named_route(now)) == "E+P+D":
            others = self._roster.encoders(now)
        elif route == "ED+P":
            decoders = [s for s in self._roster.able(now) if s.role == "decode"]
            others = [home] if home is not prefiller and home.role != "prefill" else decoders
        able = [s for s in others if may_fetch(prefiller, s) and not s.silent(now) and not s.leaving]
        return min(able, key=lambda s: (s.encoding_tokens, s.view().pending_tokens, s.name), default=None)

    def _holders(self, image: PlacedImage, now: float) -> dict[str, InstanceSession]:
        """Those that have what was seen in it, or soon will, and can give it to others; by name."""
        known = (self._sessions.get(name) for name in self._index.match([image.digest]))
        return {s.name: s for s in known if s is not None and s.peer.address and not s.silent(now)}

    def _is_coming(self, session: InstanceSession, image: PlacedImage) -> bool:
        return any((session.name, image, True) in ordered for ordered in self._ordered.values())

    @staticmethod
    def _pays(session: InstanceSession, image: PlacedImage) -> bool:
        """Whether what was seen is there sooner than it is seen again."""
        return session.encode_ms is None or _travel_ms(session, image) < image.tokens * session.encode_ms

    @staticmethod
    def _wait_ms(session: InstanceSession) -> float:
        """How long what it is to look at may take, all that it has been given included."""
        if session.encode_ms is None:
            return UNKNOWN_MS
        return GRACE_MS + PATIENCE * session.encoding_tokens * session.encode_ms

    def check(self) -> None:
        """Raise AssertionError unless instances have those images to look at that were given to them."""
        for session in self._sessions.values():
            own = Counter[Key]()
            for key, ordered in self._ordered.items():
                own[key] += sum(image.tokens for name, image, _ in ordered if name == session.name)
            assert {k: n for k, n in own.items() if n}.items() >= session.encodes.items(), "images are miscounted"


def _travel_ms(session: InstanceSession, image: PlacedImage) -> float:
    """Until it has come from another instance."""
    measured = None if session.snapshot is None else session.snapshot.embedding_mb_ms
    megabytes = image.tokens * session.ready.embedding_size * NUMBER_BYTES / 1e6
    return ROUND_TRIPS_MS + megabytes * (MB_MS if measured is None else measured)
