"""penstock: an LLM serving system. `LLM` runs an engine in this process; `penstock serve` runs a server."""

from typing import TYPE_CHECKING

from penstock.core.version import VERSION

if TYPE_CHECKING:
    from penstock.core.sampling import SamplingParams
    from penstock.llm import LLM, BeamSearchParams

__version__ = VERSION
__all__ = ["LLM", "BeamSearchParams", "SamplingParams", "__version__"]


def __getattr__(name: str) -> object:
    # lazily, so that rooms without torch can be imported without it
    if name == "LLM":
        from penstock.llm import LLM

        return LLM
    if name == "BeamSearchParams":
        from penstock.llm import BeamSearchParams

        return BeamSearchParams
    if name == "SamplingParams":
        from penstock.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")
