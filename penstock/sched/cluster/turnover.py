"""What prefilling a prompt pushes out of an instance's cache (`unified`).

A cache keeps what was used last, so where more is prefilled everything is forgotten sooner. If one instance is given
most of what is new, say because it is predicted to be a little faster, the others keep what nobody asks for any longer,
and less is found in all of them together. So a second of prefilling is dearer where more was prefilled lately, and the
more so the larger the share of the prompts that is found at all.
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
        """What a second of prefilling on an instance costs whoever looks for something there later, in seconds.

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
        # who has prefilled nothing for ever so long comes to 0, and is forgotten
        self._prefilled = {name: tokens * factor for name, tokens in self._prefilled.items() if tokens * factor}
        self._total = sum(self._prefilled.values())
