"""What each scheme of attention sends, from integers, and which sends less.

Notation: N ranks, n = S/N rows, H query and Hkv key heads of width D, G = H/Hkv, u = 2 n Hkv D elements, one rank's
keys and values. Sent per rank, forward and backward together, for causal attention of one sequence:

    exchange    0.75 (N-1) u  forward (a head-tail shard needs three quarters of the others' keys), the same again in
                the backward, and as much for dK and dV sent to their owners                        2.25 (N-1) u
    ulysses     (G + c) (N-1)/N u  forward, the same backward; c = max(1, N/Hkv) copies of each key head

so for long sequences ulysses sends less once N > 2 (G + c) / 2.25. Windows and packed documents shorten what exchange
needs, and not what ulysses needs.
"""

from __future__ import annotations


def exchange_elements(
    *, rows: int, size: int, kv_heads: int, width: int, value_width: int, needed: float, backward: bool = True
) -> float:
    """Elements sent per rank by the exchange scheme; `needed` is the fraction of the other ranks' keys that is read."""
    block = rows * kv_heads * (width + value_width)
    return needed * (size - 1) * block * (3 if backward else 1)


def ulysses_elements(
    *, rows: int, size: int, heads: int, kv_heads: int, width: int, value_width: int, backward: bool = True
) -> float:
    """Elements sent per rank by the ulysses scheme: queries and outputs, and keys and values with their copies."""
    copies = max(1.0, size / kv_heads)
    block = rows * (heads + copies * kv_heads) * (width + value_width)
    return block * (size - 1) / size * (2 if backward else 1)


def needed_fraction(*, length: int, size: int, causal: bool, window: int | None, document: float | None) -> float:
    """Roughly which part of the other ranks' keys a rank reads: three quarters under a head-tail layout, less where a
    window or the mean length of documents limits how far a query sees."""
    if size == 1:
        return 0.0
    fraction = 0.75 if causal else 1.0
    reach = min(window or length, document or length, length)
    # Every piece of a rank (two in a head-tail layout) reads `reach` keys beside itself.
    return min(fraction, 2 * reach / max(1, length - length // size))


def cheaper_scheme(
    *, length: int, size: int, heads: int, kv_heads: int, width: int, value_width: int, needed: float
) -> str:
    """ "ulysses" or "exchange", whichever sends less; ulysses only where every rank gets the same number of heads,
    because uneven heads are uneven work."""
    if heads % size:
        return "exchange"
    rows = length // size
    over_heads = ulysses_elements(
        rows=rows, size=size, heads=heads, kv_heads=kv_heads, width=width, value_width=value_width
    )
    over_keys = exchange_elements(
        rows=rows, size=size, kv_heads=kv_heads, width=width, value_width=value_width, needed=needed
    )
    return "ulysses" if over_heads < over_keys else "exchange"
