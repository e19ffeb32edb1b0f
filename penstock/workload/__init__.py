"""Which requests come, and when: arrivals, lengths, shared prefixes and recorded traces.

Everything here is a function of its arguments: randomness is a seeded numpy Generator handed in, times are seconds from
the start of the workload, and nothing reads a clock.
"""
