"""How a process of a deployment protects its links to other hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.service.curve import Curve

SECRET = "PENSTOCK_CLUSTER_SECRET"


def curve_of(settings: Mapping[str, Any]) -> Curve | None:
    """By the deployment's secret, where the settings of the process say that links are secured."""
    if not settings.get("secured"):
        return None
    from penstock.service.curve import Curve

    return Curve(os.environ[SECRET])
