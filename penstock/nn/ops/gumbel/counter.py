"""The counter-based generator: SplitMix64's finaliser (Steele, Lea, Flood 2014) over seed, position and token."""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
SHIFTS = (30, 27, 31)


def mix(x: int) -> int:
    """A bijection of 64-bit integers in which every input bit reaches every output bit."""
    x &= MASK
    for shift, multiplier in zip(SHIFTS, MULTIPLIERS, strict=False):
        x = ((x ^ x >> shift) * multiplier) & MASK
    return x ^ x >> SHIFTS[2]


def signed(x: int) -> int:
    """The same 64 bits as a signed integer."""
    return x - (1 << 64) if x >> 63 else x


def row_key(seed: int, position: int) -> int:
    """The key of every token's noise at one position of one sequence, as a signed 64-bit integer."""
    return signed(mix(mix(seed + GOLDEN) + position * GOLDEN))
