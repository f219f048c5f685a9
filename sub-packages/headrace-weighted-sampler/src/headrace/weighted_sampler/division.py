"""``floor(count * part / whole + 1/2)`` of 64-bit integers, exactly."""

import numpy as np

from headrace.weighted_sampler.keyed import Indices


def rounded_share(counts: Indices, part: int, whole: int) -> Indices:
    """Round ``counts * part / whole`` to the nearest integer, halves upwards.

    The product may need 124 bits, so the counts are taken a few bits at a time, as in long division by hand.
    Up to a whole of 2**31 that is a single step.

    Args:
        counts: Shape ``[m]``, values ``0 .. whole``.
        part: From 0 to ``whole``.
        whole: From 1 to 2**62.

    Returns:
        Shape ``[m]``.

    >>> rounded_share(np.array([0, 1, 2, 3]), part=1, whole=3).tolist()
    [0, 0, 1, 1]
    >>> int(rounded_share(np.array([2**61]), part=2**61 + 1, whole=2**62)[0]) == 2**60 + 1
    True
    """
    if whole <= 2**31:
        return (counts * part + whole // 2) // whole
    bits = 63 - whole.bit_length() or 1  # of the counts in one step: rest * 2**bits + limb * part < 2**64
    words, quotient, rest = counts.view(np.uint64), np.zeros(len(counts), np.uint64), np.zeros(len(counts), np.uint64)
    for shift in reversed(range(0, whole.bit_length(), bits)):
        limb = (words >> np.uint64(shift)) & np.uint64(2**bits - 1)
        rest = (rest << np.uint64(bits)) + limb * np.uint64(part)
        if shift == 0:
            rest += np.uint64(whole // 2)
        more = rest // np.uint64(whole)
        rest -= more * np.uint64(whole)
        quotient = (quotient << np.uint64(bits)) + more
    return quotient.view(np.int64)
