"""Which rows a tail has, from the definition: a tournament of positions, played from below."""

import numpy as np

LEVELS = 5  # that share the coins of one hash
MASK = 0xFFFFFFFF


def seed_of(seed: int) -> int:
    """The upper half of the first number of SplitMix64."""
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return (z ^ z >> 31) >> 32


def coins(keys: np.ndarray, seed: int) -> np.ndarray:
    """32 coins of each key, from integers that do not overflow."""
    x = keys.astype(np.uint64) ^ np.uint64(seed)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor) & np.uint64(MASK)
    return x ^ x >> np.uint64(16)


class Tournament:
    """`rows(level)` has the position that is drawn from each interval of 2^level positions."""

    def __init__(self, positions: int, seed: int = 42, *, own_seed: int | None = None):
        """`own_seed` is a sequence's, in place of what follows from a policy's `seed`."""
        self.seed = seed_of(seed) if own_seed is None else own_seed
        self.drawn = [np.arange(1 << max(positions - 1, 0).bit_length())]

    def rows(self, level: int) -> np.ndarray:
        while len(self.drawn) <= level:
            below = self.drawn[-1]
            if len(below) % 2:  # one interval has all positions: the other half has none
                below = np.append(below, 1 << 40)
            at = len(self.drawn)
            interval = np.arange(len(below) // 2)
            group, place = divmod(at - 1, LEVELS)
            depth = LEVELS - 1 - place  # levels above it with the same coins
            coin = (1 << depth) + interval % (1 << depth)
            flips = coins((group << 27) + (interval >> depth), self.seed)
            right = flips >> coin.astype(np.uint64) & np.uint64(1)
            self.drawn.append(below.reshape(-1, 2)[interval, right.astype(int)])
        return self.drawn[level]

    def of(self, begin: int, end: int, rows: int) -> tuple[int, np.ndarray]:
        """(level, positions) of a zone: the shortest intervals that leave twice the rows."""
        level = 0
        while True:
            drawn = self.rows(level)
            inside = drawn[(drawn >= begin) & (drawn < end)]
            if len(inside) <= 2 * rows:
                return level, inside
            level += 1


def sampled(begin: int, end: int, rows: int, seed: int = 42) -> np.ndarray:
    """Positions of the rows of a tail."""
    return Tournament(end, seed).of(begin, end, rows)[1]
