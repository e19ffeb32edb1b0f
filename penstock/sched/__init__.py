"""Decisions, and nothing but decisions: no tensors, no clock, no I/O."""
