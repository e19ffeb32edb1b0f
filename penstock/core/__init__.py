"""Types that all packages share: requests, plans, errors, the clock, messages. Imports nothing but the standard library
and msgspec."""
