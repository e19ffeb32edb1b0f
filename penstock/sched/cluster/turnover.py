"""The cost of cache eviction by prefilling a prompt (`unified`).

An LRU cache that prefills more evicts sooner. If one instance gets most of the new prompts, say because it is predicted
to be a little faster, the other caches keep unused prefixes, and the cluster's hit rate falls. So a second of
prefilling costs more where more was prefilled lately, in proportion to the hit rate.
"""

from __future__ import annotations

from math import exp

HORIZON = 60.0  # seconds after which what was prefilled counts only 1/e
LATELY = 50  # prompts by which the share that is found is known
# seconds that a second of prefilling costs others where everything is found, and all instances prefill alike
WEIGHT = 1.0
FAR = 100.0  # horizons after which numbers are made small again


class Turnover:
    """How much each instance has prefilled lately, and how much was found instead."""

    def __init__(self) -> None:
        self._prefilled: dict[str, float] = {}  # tokens; instead of the old ones losing weight the new ones have more
        self._total = 0.0  # of them
        self._since = 0.0  # when a token had the weight 1
        self._asked = self._found = 0.0  # tokens of the last prompts

    def cost(self, name: str, among: int) -> float:
        """The cost of a second of prefilling on an instance for later requests, in seconds.

        Args:
            among: instances.
        """
        if not self._found or not self._total:
            return 0.0
        return WEIGHT * self._found / self._asked * self._prefilled.get(name, 0.0) * among / self._total

    def note(self, now: float, name: str, prompt_tokens: int, computed: int) -> None:
        """A prompt goes to an instance.

        Args:
            now: seconds of any clock, always the same one.
            computed: its tokens that are not in the cache there.
        """
        age = (now - self._since) / HORIZON
        if age > FAR:
            self._rescale(exp(-min(age, 7 * FAR)))
            self._since, age = now, 0.0
        tokens = computed * exp(age)
        self._prefilled[name] = self._prefilled.get(name, 0.0) + tokens
        self._total += tokens
        rest = 1 - 1 / LATELY
        self._asked = self._asked * rest + prompt_tokens
        self._found = self._found * rest + prompt_tokens - computed

    def _rescale(self, factor: float) -> None:
        # instances without recent prefills reach 0 and are removed
        self._prefilled = {name: tokens * factor for name, tokens in self._prefilled.items() if tokens * factor}
        self._total = sum(self._prefilled.values())
