// One token of what a Mamba-2 layer does between its projections, in one kernel: convolution, recurrence and gate.
//
//   xBC   = silu(conv_bias + sum_k filter_k xBC[t - (Width - 1) + k])
//   state = exp(A step) state + (step x) B,   y = (C . state + D x) silu(z),   step = clamp(softplus(dt + dt_bias))
//
// A block takes rows of the state of one head. Their loads are under way before anything else; the convolution of the
// head's B and C and of the rows' x goes through shared memory in the meantime. Other blocks read the same tokens of B
// and C, so the window is a ring: a token takes the place of the one that has just left it, which nobody reads.

#include "mamba2_step.cuh"

using namespace jax_ssd;

// state [batch, Heads, P, N]; window_x [batch, Width, Heads, P]; window_bc [batch, Width, 2 Groups N], B before C;
// projected [batch, AllHeads P (z) | AllHeads P (x) | Groups N (B) | Groups N (C) | AllHeads (dt)];
// position [1 or batch]: of the token, whose place in the rings is position % Width; head_of [1 or batch, Heads]: which
// of AllHeads each is; filter_x [1 or batch, Width, Heads, P], filter_bc [.., Width, 2 Groups N], bias_x
// [.., Heads, P], bias_bc [.., 2 Groups N]; A, dt_bias [.., Heads]; D [.., Heads, P]; y [batch, Heads, P].
// HasNorm: what was projected is to be multiplied by rsqrt(share squares + epsilon), squares [batch].
// Absent arrays are not touched. Rows, Threads: powers of two.
template <typename Value, typename Window, typename State, int Heads, int AllHeads, int Groups, int P, int N, int Width,
          bool SharedParams, bool HasConvBias, bool Gates, bool HasNorm, int Rows, int Threads>
__global__ void __launch_bounds__(Threads)
    mamba2_mixer_step(State* state, Window* window_x, Window* window_bc, const float* projected, const int* position,
                      const int* head_of, const float* filter_x, const float* filter_bc, const float* bias_x,
                      const float* bias_bc, const float* A, const float* D, const float* dt_bias, const float* squares,
                      Value* y, float low, float high, float share, float epsilon) {
  constexpr int kWidth = common_divisor(N, 16 / int(sizeof(State)));  // values that one load of the state moves
  constexpr int kVectors = N / kWidth;
  constexpr int kLanes = smaller(32, power_of_two(kVectors));
  constexpr int kPerLane = ceiling(kVectors, kLanes);
  constexpr int kBlockRows = Threads / kLanes * Rows;
  constexpr int kParts = ceiling(P, kBlockRows);
  constexpr int kFeatures = 2 * AllHeads * P + 2 * Groups * N + AllHeads;
  constexpr int kGrouped = 2 * Groups * N;
  using StatePack = Pack<State, kWidth>;

  __shared__ __align__(16) float inputs[kBlockRows], to_state[N], to_output[N];

  const int lane = threadIdx.x % kLanes, unit = threadIdx.x / kLanes;
  const int begin = int(blockIdx.x % kParts) * kBlockRows, first = begin + unit * Rows;
  const unsigned row_and_head = blockIdx.x / kParts;
  const int head = row_and_head % Heads;
  const long long row = row_and_head / Heads, param = SharedParams ? 0 : row;

  StatePack old[Rows][kPerLane];
  const auto inside = [&](int r, int i) {
    return (P % kBlockRows == 0 || first + r < P) && (kVectors % kLanes == 0 || i * kLanes + lane < kVectors);
  };
  state += ((long long)row_and_head * P + first) * N + lane * kWidth;
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (inside(r, i)) old[r][i].load(state + r * N + i * kLanes * kWidth);
    }
  }
  __syncthreads();  // keeps the compiler from putting loads off

  const int index = Heads == AllHeads ? head : head_of[param * Heads + head], group = index / (AllHeads / Groups);
  const int place = unsigned(position[param]) % Width;
  projected += row * kFeatures;
  const float scale = HasNorm ? rsqrtf(share * squares[row] + epsilon) : 1.0f;
  const float logit = scale * projected[kFeatures - AllHeads + index] + dt_bias[param * Heads + head];
  const float rate = A[param * Heads + head];

  // The rows whose output this lane writes.
  constexpr int kHeld = larger(1, Rows / kLanes), kSharing = larger(1, kLanes / Rows);
  const int own = lane / kSharing * kHeld;
  float skip[kHeld], gate[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const bool there = P % kBlockRows == 0 || first + own + i < P;
    skip[i] = there ? D[(param * Heads + head) * P + first + own + i] : 0.0f;
    gate[i] = Gates && there ? scale * projected[index * P + first + own + i] : 0.0f;
  }

  // Channels of B and C, then of x, each by one thread.
  constexpr int kPack = common_divisor(common_divisor(N, P), common_divisor(common_divisor(kBlockRows, AllHeads), 2));
  for (int item = threadIdx.x; item < (2 * N + kBlockRows) / kPack; item += Threads) {
    const int channel = item * kPack, p = begin + channel - 2 * N;
    const bool grouped = channel < 2 * N;
    if (!grouped && p >= P) break;
    const int from = channel / N * Groups * N + group * N + channel % N;  // of B or C
    Window* window =
        grouped ? window_bc + row * Width * kGrouped + from : window_x + (row * Width * Heads + head) * P + p;
    const float* filter =
        grouped ? filter_bc + param * Width * kGrouped + from : filter_x + (param * Width * Heads + head) * P + p;
    const int stride = grouped ? kGrouped : Heads * P;
    const float* given = projected + (grouped ? 2 * AllHeads * P + from : (AllHeads + index) * P + p);

    float token[kPack], sum[kPack] = {};
    if (HasConvBias)
      load_values(sum, grouped ? bias_bc + param * kGrouped + from : bias_x + (param * Heads + head) * P + p);
    load_values(token, given);
#pragma unroll
    for (int j = 0; j < kPack; ++j) token[j] = to_float(from_float<Value>(scale * token[j]));
    Pack<Window, kPack> kept[larger(1, Width - 1)];
    float weight[Width][kPack];
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      const int slot = place + 1 + k < Width ? place + 1 + k : place + 1 + k - Width;
      if (k < Width - 1) kept[k].load(window + slot * stride);
      load_values(weight[k], filter + k * stride);
    }
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      float values[kPack];
      if (k < Width - 1) kept[k].unpack(values);
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum[j] += weight[k][j] * (k < Width - 1 ? values[j] : token[j]);
    }
    if (!grouped) store_values(window + place * stride, token);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[j] = sum[j] / (1.0f + expf(-sum[j]));
    store_values(!grouped ? inputs + p - begin : channel < N ? to_state + channel : to_output + channel - N, sum);
  }
  if (head == 0 && begin == 0) {  // of all groups, also of those that no head here reads
    for (int c = threadIdx.x; c < kGrouped; c += Threads) {
      window_bc[(row * Width + place) * kGrouped + c] =
          from_float<Window>(to_float(from_float<Value>(scale * projected[2 * AllHeads * P + c])));
    }
  }
  const float step = clamp(softplus(logit), low, high), keep = expf(step * rate);
  __syncthreads();

  float enters[Rows], sums[Rows] = {};
  load_values(enters, inputs + unit * Rows);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) skip[i] *= inputs[unit * Rows + own + i];
#pragma unroll
  for (int r = 0; r < Rows; ++r) enters[r] *= step;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    float b[kWidth] = {}, c[kWidth] = {};
    if (kVectors % kLanes == 0 || i * kLanes + lane < kVectors) {
      load_values(b, to_state + (i * kLanes + lane) * kWidth);
      load_values(c, to_output + (i * kLanes + lane) * kWidth);
    }
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      if (!inside(r, i)) continue;
      float values[kWidth];
      old[r][i].unpack(values);
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        values[j] = keep * values[j] + enters[r] * b[j];
        sums[r] += values[j] * c[j];
      }
      old[r][i].pack(values);
      old[r][i].store(state + r * N + i * kLanes * kWidth);
    }
  }

  sum_over_lanes<Rows, kLanes / 2>(sums, lane);
  if (lane % kSharing != 0) return;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (P % kBlockRows != 0 && first + own + i >= P) continue;
    float out = sums[i] + skip[i];
    if (Gates) out *= gate[i] / (1.0f + expf(-gate[i]));
    y[(long long)row_and_head * P + first + own + i] = from_float<Value>(out);
  }
}
