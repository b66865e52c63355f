"""Step sizes and running decays: everything that is computed from dt, A and dt_bias, once for all kernels.

A token's step is clamp(softplus?(dt + dt_bias)), its log2 decay is step * A * log2(e). Decays are in log2 units, so
that every exponential is an exp2, and their running sum restarts in every chunk (and in every run of packed sequences).
"""

import cuda.tile as ct

Const = ct.Constant
ZERO = ct.PaddingMode.ZERO
LOG2E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.42860682030941723212e-6  # ln 2 = high + low; n * high is exact for small n
# A decay of 2**-160 is zero in float32. Cutting each step there changes no result and keeps the running sums small, so
# that small decays after a huge one are still exact as differences of sums.
FLOOR = -160.0
INF = float("inf")


def exp_of_negative(v):
    """exp(v) for v <= 0 within about one rounding; the hardware exponential alone loses log2(|v|) bits."""
    v = ct.where(v < -104.0, -104.0, v)  # zero in float32 below; a NaN stays
    n = ct.floor(v * LOG2E + 0.5)
    rest = (v - n * LN2_HIGH) - n * LN2_LOW
    return ct.exp2(rest * LOG2E) * ct.exp2(n)


def softplus(v):
    """log(1 + exp(v)), relatively exact in both tails: max(v, 0) + log1p(exp(-|v|)).

    log1p(u) is taken as 2 atanh(u / (2 + u)).
    """
    size = ct.where(v < 0.0, v, -v)
    u = exp_of_negative(size)
    s = u / (2.0 + u)  # in [0, 1/3]: eight terms of the series reach float32
    q = s * s
    series = 1.0 / 13.0 + q * (1.0 / 15.0 + q * (1.0 / 17.0))
    series = 1.0 / 7.0 + q * (1.0 / 9.0 + q * (1.0 / 11.0 + q * series))
    series = 1.0 + q * (1.0 / 3.0 + q * (1.0 / 5.0 + q * series))
    return ct.where(v < 0.0, 0.0, v) + 2.0 * s * series


def step_size(v, SOFTPLUS, LOW, HIGH):
    """The step of raw + bias (float32); comparisons are written so that a NaN passes through."""
    if SOFTPLUS:
        v = softplus(v)
    v = ct.where(v < LOW, LOW, v)
    if HIGH < INF:
        v = ct.where(v > HIGH, HIGH, v)
    return v


def log2_decay(step, A):
    """step * A in log2 units, cut at FLOOR."""
    v = step * (A * LOG2E)
    return ct.where(v < FLOOR, FLOOR, v)


def exp2(v):
    """2**v. What is too small for a normal float32 becomes zero, which saves three instructions of four."""
    return ct.exp2(v, flush_to_zero=True)


def source_exponent(step, decay):
    """log2 of a token's weight where its chunk starts: exp2(decay_i - source_j) is exp2(decay_i - decay_j) * step_j.

    One exponential then does what else takes a product per pair. It costs the last bits of a float32, and a step that
    is negative has no logarithm.
    """
    return decay - ct.log2(step)


def param_row(row, SHARED):
    """The row of a [rows, heads, ...] parameter that belongs to a batch row."""
    if SHARED:
        r = 0
    else:
        r = row
    return r


def run_numbers(runs, row, chunk, Q: Const[int], SEQ: Const[int]):
    """Of one chunk's tokens: run number [Q], whether it is a real token [Q], and the last token's run [1].

    Positions past the end of the sequence count as padding in the last run.
    """
    run = ct.load(runs, index=(row, chunk), shape=(1, Q), padding_mode=ZERO).reshape((Q,))
    number = ct.where(run < 0, -1 - run, run)
    end = ct.max(number, axis=0, keepdims=True)  # numbers never decrease, and a position past the end reads 0
    inside = chunk * Q + ct.arange(Q, dtype=ct.int32) < SEQ
    return ct.where(inside, number, end), (run >= 0) & inside, end


@ct.kernel
def prepare(
    dt,
    dt_bias,
    A,
    runs,
    step,
    decay,
    Q: Const[int],
    HEAD_BLOCK: Const[int],
    HEAD_BLOCKS: Const[int],
    CHUNKS: Const[int],
    SEQ: Const[int],
    SHARED_PARAMS: Const[bool],
    HAS_BIAS: Const[bool],
    SOFTPLUS: Const[bool],
    LOW: Const[float],
    HIGH: Const[float],
    HAS_RUNS: Const[bool],
):
    """dt [batch, seq, heads] -> step, decay [batch, heads, CHUNKS * Q] float32; one program per (row, chunk, heads).

    step is 0 for padding tokens and past the end; decay is its inclusive running log2 decay within the chunk, and
    within the run if there are runs. A chunk of one head is a contiguous stretch for the kernels that follow.
    """
    pid = ct.bid(0)
    block = pid % HEAD_BLOCKS
    chunk = pid // HEAD_BLOCKS % CHUNKS
    row = pid // (HEAD_BLOCKS * CHUNKS)
    shared = param_row(row, SHARED_PARAMS)
    raw = ct.load(dt, index=(row, chunk, block), shape=(1, Q, HEAD_BLOCK), padding_mode=ZERO).reshape((Q, HEAD_BLOCK))
    raw = raw.astype(ct.float32).transpose()
    a = ct.load(A, index=(shared, block), shape=(1, HEAD_BLOCK), padding_mode=ZERO).reshape((HEAD_BLOCK, 1))
    if HAS_BIAS:
        bias = ct.load(dt_bias, index=(shared, block), shape=(1, HEAD_BLOCK), padding_mode=ZERO)
        raw = raw + bias.reshape((HEAD_BLOCK, 1))
    sizes = step_size(raw, SOFTPLUS, LOW, HIGH)
    token = ct.arange(Q, dtype=ct.int32)
    if HAS_RUNS:
        number, real, _ = run_numbers(runs, row, chunk, Q, SEQ)
    else:
        real = chunk * Q + token < SEQ
    sizes = ct.where(real[None, :], sizes, 0.0)
    logs = ct.where(real[None, :], log2_decay(sizes, a), 0.0)
    if HAS_RUNS:
        # A sum over the tokens of the same run, so that neither a NaN nor rounding passes from one run to the next.
        together = (token[:, None] >= token[None, :]) & (number[:, None] == number[None, :])
        sums = ct.sum(ct.where(together[None, :, :], logs[:, None, :], 0.0), axis=2)
    else:
        sums = ct.cumsum(logs, axis=1)
        # A scan on the GPU adds in another order at every position. Past the end the sum is that of the last token, to
        # the bit: its own weight in the final state is 2**0.
        end = ct.sum(ct.where((chunk * Q + token == SEQ - 1)[None, :], sums, 0.0), axis=1, keepdims=True)
        sums = ct.where(real[None, :], sums, end)
    ct.store(step, index=(row, block, chunk), tile=sizes.reshape((1, HEAD_BLOCK, Q)))
    ct.store(decay, index=(row, block, chunk), tile=sums.reshape((1, HEAD_BLOCK, Q)))
