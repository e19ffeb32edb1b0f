"""What computes an engine's steps: in the engine's process, or in several that share a model.

A worker owns a device, its shard of the weights, its part of the KV cache, and its runner. An executor gives every
worker the engine's plans, in order, and brings back what came of them.
"""

from penstock.engine.executor.base import Computes, Executor, MaskCosts, Pending, Ran
from penstock.engine.executor.inline import InlineExecutor

__all__ = ["Computes", "Executor", "InlineExecutor", "MaskCosts", "Pending", "Ran"]
