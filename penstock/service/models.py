"""The models behind one endpoint: which of them a request is for, and how all of them do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.core.errors import InvalidRequest, ModelNotFound, Unavailable

if TYPE_CHECKING:
    from penstock.service.frontend import Frontend


class Models:
    """
    Args:
        frontends: one for each model; no name is served by two.

    Attributes:
        draining: whether the server is draining: running requests continue, new ones are refused.
    """

    def __init__(self, frontends: Sequence[Frontend]) -> None:
        self.frontends = frontends
        self.draining = False

    @property
    def names(self) -> list[str]:
        """That clients may use, of all."""
        return [name for frontend in self.frontends for name in frontend.served_names]

    def of(self, name: str | None) -> Frontend:
        """The one that serves the model of this name; without a name, the only one.

        Raises:
            ModelNotFound: there is none of this name.
            InvalidRequest: there are several, and none is named.
        """
        if name is None and len(self.frontends) > 1:
            raise InvalidRequest(f"model: missing, allowed are {', '.join(self.names)}", "model")
        for frontend in self.frontends:
            if name is None or name in frontend.served_names:
                return frontend
        raise ModelNotFound(f"model: {name!r} is not served here, allowed is {', '.join(self.names)}", "model")

    def asked(self, name: str | None) -> Sequence[Frontend]:
        """The one that serves the model of this name; without a name, all. Raises ModelNotFound."""
        return self.frontends if name is None else [self.of(name)]


def check_any(frontends: Sequence[Frontend], check: Callable[[Frontend], None]) -> None:
    """Raises Unavailable when each of them raises that: with what is wrong, and where it is several, of which model."""
    troubles: dict[str, Unavailable] = {}
    for frontend in frontends:
        try:
            return check(frontend)
        except Unavailable as trouble:
            troubles[frontend.served_names[0]] = trouble
    if len(troubles) == 1:
        raise next(iter(troubles.values()))
    told = "; ".join(f"{name}: {trouble}" for name, trouble in troubles.items())
    raise Unavailable(told, min(trouble.retry_after for trouble in troubles.values()))
