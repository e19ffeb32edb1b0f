"""Policies by name. A name is a whole bundle: everything about a cluster that is decided and not configured."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.sched.cluster import DISPATCH, DispatchPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """
    Attributes:
        dispatch: name of a policy in `sched.cluster.DISPATCH`.
    """

    dispatch: str

    def make_dispatch(self) -> DispatchPolicy:
        """A fresh one: policies remember."""
        return DISPATCH[self.dispatch]()


BUNDLES = {
    "round_robin": Bundle(dispatch="round-robin"),
    "least_loaded": Bundle(dispatch="least-loaded"),
}
