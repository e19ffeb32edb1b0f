"""Benchmarks of a server or an engine, as its users see it. Where a number is uncertain, it errs against the server."""
