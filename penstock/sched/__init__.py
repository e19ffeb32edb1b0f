"""Scheduling decisions: no tensors, no clock, no I/O."""
