"""Matrix products in the precision and orientation that were asked for: the one place where they are decided.

PASSES = 0: operands go to the tensor cores as they are (bfloat16 inputs), float32 accumulation.
PASSES = 1: operands rounded to TF32, relative error about 2**-11 per operand. float16 inputs are exact in it, and what
is computed from them, such as small steps and large states, needs its exponents.
PASSES = 3: float32 operands split in two TF32 parts, high @ high + high @ low + low @ high; what is dropped is 2**-22.

SWAP: every matrix is kept transposed, and the operands of products are exchanged. Of what a kernel writes as a @ b the
columns of b are then the rows of the tensor cores, which take b from registers instead of a.
"""

import cuda.tile as ct


def sides(m, n, SWAP):
    """The shape in which a matrix [m, n] is kept."""
    return (n, m) if SWAP else (m, n)


def column(v, SWAP):
    """A vector [m] as a matrix [m, 1]; `column(v, not SWAP)` is a row."""
    return v.reshape(sides(v.shape[0], 1, SWAP))


def dot(a, b, acc, PASSES, SWAP=False):
    """acc + a @ b: a [m, k], b [k, n], acc [m, n] float32."""
    if SWAP:
        a, b = b, a
    if PASSES == 0:
        acc = ct.mma(a, b, acc)
    elif PASSES == 1:
        a, b = a.astype(ct.float32), b.astype(ct.float32)
        acc = ct.mma(a.astype(ct.tfloat32), b.astype(ct.tfloat32), acc)
    else:
        a_high, a_low = split(a)
        b_high, b_low = split(b)
        acc = ct.mma(a_low, b_high, acc)  # the small parts first: they are added to a smaller sum
        acc = ct.mma(a_high, b_low, acc)
        acc = ct.mma(a_high, b_high, acc)
    return acc


def factor(tile, dtype, PASSES):
    """A float32 tile as an operand of `dot` beside inputs of that dtype."""
    if PASSES == 0:
        tile = tile.astype(dtype)
    return tile


def split(a):
    """A float32 tile as the sum of two TF32 tiles."""
    high = a.astype(ct.tfloat32)
    low = (a - high.astype(ct.float32)).astype(ct.tfloat32)
    return high, low
