"""Workloads: arrivals, lengths, shared prefixes and recorded traces.

Everything here is a function of its arguments: randomness comes from a seeded numpy Generator argument, times are
seconds from the start of the workload, and no clock is read.
"""
