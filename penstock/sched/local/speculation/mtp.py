"""Multi-token prediction: a layer behind the model's last one drafts, with the hidden states that a step has left
(DeepSeek-AI, "DeepSeek-V3", 2024, section 2.2). So do other heads of a model.
"""

from __future__ import annotations

from collections.abc import Sequence


class HeadDrafts:
    """What a head of the model has drafted for one sequence, in the step that drew its last token.

    It cannot tell how sure it is.
    """

    levels, agreed = 1, 0

    def __init__(self) -> None:
        self._drafts: Sequence[int] = ()

    def land(self, tokens: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """These were drawn, and those drafted behind them."""
        self._drafts = drafts

    def propose(self, most: int) -> list[int]:
        """Nothing where none were drafted behind the last token."""
        return list(self._drafts[:most])
