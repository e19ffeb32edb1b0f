"""The words every room uses: requests, plans, errors, the clock, the wire. Imports nothing but the standard library
and msgspec."""
