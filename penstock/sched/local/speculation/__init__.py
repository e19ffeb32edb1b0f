"""Speculation: drafts of what will be drawn, computed in the same step, so that one step yields several tokens.

A proposer guesses, or is told what a head of the model has guessed; `Speculation` decides how many guesses a step
computes. A new proposer is a file here and a line in `PROPOSERS`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock.core.errors import ConfigError
from penstock.sched.local.sequence import Sequence
from penstock.sched.local.speculation.adaptive import Proposer, Speculation, SpeculationCounters
from penstock.sched.local.speculation.mtp import HeadDrafts
from penstock.sched.local.speculation.ngram import PromptLookup

__all__ = ["HEADS", "PROPOSERS", "Proposer", "Speculation", "SpeculationCounters", "checked", "make_speculation"]

AUTO, OFF = "auto", "off"
BY_DEFAULT = {"method": "ngram", "num_speculative_tokens": 16}
MOST_DRAFTS = 64  # of a sequence in a step

MakeProposer = Callable[[Sequence], Proposer]


def _ngram(config: dict[str, Any]) -> MakeProposer:
    least, most = config.pop("prompt_lookup_min", None), config.pop("prompt_lookup_max", None)
    if least is None and most is None:
        least, most = 2, 8
    most = _whole("prompt_lookup_max", least if most is None else most, 1, 64)
    least = _whole("prompt_lookup_min", most if least is None else least, 1, most)

    def make(sequence: Sequence) -> PromptLookup:
        request = sequence.request
        proposer = PromptLookup(request.prompt, request.prediction, least=least, most=most)
        proposer.land(sequence.tokens[len(request.prompt) :])
        return proposer

    return make


def _mtp(config: dict[str, Any]) -> MakeProposer:
    return lambda sequence: HeadDrafts()


# method -> what makes a proposer for a sequence, of the settings that it takes out of a configuration
PROPOSERS: dict[str, Callable[[dict[str, Any]], MakeProposer]] = {"ngram": _ngram, "mtp": _mtp}
HEADS = ("mtp",)  # methods whose drafts a head of the model makes


def make_speculation(asked: str) -> Speculation | None:
    """
    Args:
        asked: "auto", "off", or vLLM's JSON object: "method", "num_speculative_tokens", and what the method has; of our
            own "adaptive", false for as many drafts as allowed whether that pays or not.

    Returns:
        None for "off".

    Raises:
        ConfigError: naming what is allowed.
    """
    try:
        return _make(asked)
    except ValueError as error:
        raise ConfigError(f"speculative-config: {asked!r}, allowed is {error}", "speculative-config") from None


def checked(asked: str) -> str:
    """The same text. Raises ValueError that says what is allowed; see `make_speculation`."""
    _make(asked)
    return asked


def _make(asked: str) -> Speculation | None:
    if asked == OFF:
        return None
    config = dict(BY_DEFAULT) if asked == AUTO else _parsed(asked)
    method = config.pop("method", None)
    if isinstance(method, str) and method.endswith("_mtp"):
        method = "mtp"  # vLLM's names of before, by family: deepseek_mtp
    if method not in PROPOSERS:
        raise ValueError(f'"method": {" or ".join(json.dumps(name) for name in PROPOSERS)}')
    count = _whole("num_speculative_tokens", config.pop("num_speculative_tokens", None), 1, MOST_DRAFTS)
    adaptive = config.pop("adaptive", True)
    if not isinstance(adaptive, bool):
        raise ValueError('"adaptive": true or false')
    make = PROPOSERS[method](config)
    if config:
        raise ValueError(f"no {json.dumps(next(iter(config)))} with this method")
    return Speculation(make, count, adaptive=adaptive, head=method if method in HEADS else None)


def _parsed(asked: str) -> dict[str, Any]:
    try:
        config = json.loads(asked)
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError('auto, off, or a JSON object such as {"method": "ngram", "num_speculative_tokens": 4}')
    return config


def _whole(name: str, value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f'"{name}": {least} to {most}')
    return value
