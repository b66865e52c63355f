// One token of what a Mamba-2 layer does between its projections, in one kernel: convolution, recurrence and gate.
//
//   xBC   = silu(conv_bias + sum_k filter_k xBC[t - (Width - 1) + k])
//   state = exp(A step) state + (step x) B,   y = (C . state + D x) silu(z),   step = clamp(softplus(dt + dt_bias))
//
// A block takes rows of the state of one head. While they are on their way, the convolution of the head's B and C and
// of the rows' x goes through shared memory. Other blocks read the same tokens of B and C, so the window is a ring: a
// token takes the place of the one that has just left it, whose value nobody uses.

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

  const int index = Heads == AllHeads ? head : head_of[param * Heads + head], group = index / (AllHeads / Groups);
  projected += row * kFeatures;

  // Everything is loaded before anything is used, and what is used first comes first: channels of B and C, then of x,
  // each by one thread. All places of the rings are read, so that no load waits for the token's position.
  constexpr int kPack = common_divisor(common_divisor(N, P), common_divisor(common_divisor(kBlockRows, AllHeads), 2));
  constexpr int kItems = (2 * N + kBlockRows) / kPack;
  Pack<Window, kPack> kept[Width];
  Pack<float, kPack> taps[Width], token, bias;
  Window* window = nullptr;  // of the channels; null if there are none
  float* filtered = nullptr;
  int stride = 0;
  bool of_x = false;
  const auto load_channels = [&](int item) {
    const int channel = item * kPack, p = begin + channel - 2 * N;
    const bool grouped = channel < 2 * N;
    window = nullptr;
    if (item >= kItems || (!grouped && p >= P)) return;
    const int from = channel / N * Groups * N + group * N + channel % N;  // of B or C
    const long long own = (param * Heads + head) * P + p;
    window = grouped ? window_bc + row * Width * kGrouped + from : window_x + (row * Width * Heads + head) * P + p;
    filtered = !grouped ? inputs + p - begin : channel < N ? to_state + channel : to_output + channel - N;
    stride = grouped ? kGrouped : Heads * P;
    of_x = !grouped;
    const float* filter =
        grouped ? filter_bc + param * Width * kGrouped + from : filter_x + (param * Width * Heads + head) * P + p;
    token.load(projected + (grouped ? 2 * AllHeads * P + from : (AllHeads + index) * P + p));
    if (HasConvBias) bias.load(grouped ? bias_bc + param * kGrouped + from : bias_x + own);
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      kept[k].load(window + k * stride);
      taps[k].load(filter + k * stride);
    }
  };
  load_channels(threadIdx.x);
  const int position_of = position[param];
  const float square = HasNorm ? squares[row] : 0.0f;
  const float dt = projected[kFeatures - AllHeads + index], shift = dt_bias[param * Heads + head];
  const float rate = A[param * Heads + head];

  // The rows whose output this lane writes.
  constexpr int kHeld = larger(1, Rows / kLanes), kSharing = larger(1, kLanes / Rows);
  const int own = lane / kSharing * kHeld;
  float skip[kHeld], gate[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const bool there = P % kBlockRows == 0 || first + own + i < P;
    skip[i] = there ? D[(param * Heads + head) * P + first + own + i] : 0.0f;
    gate[i] = Gates && there ? projected[index * P + first + own + i] : 0.0f;
  }

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

  const int place = unsigned(position_of) % Width;
  const float scale = HasNorm ? rsqrtf(share * square + epsilon) : 1.0f;
  const auto filter_channels = [&]() {
    if (window == nullptr) return;
    float sum[kPack] = {}, now[kPack], weight[kPack];
    if (HasConvBias) bias.unpack(sum);
    token.unpack(now);
#pragma unroll
    for (int j = 0; j < kPack; ++j) now[j] = to_float(from_float<Value>(scale * now[j]));
#pragma unroll
    for (int k = 0; k < Width; ++k) {
      taps[k].unpack(weight);
      float values[kPack] = {};
      if (k == Width - 1) {
#pragma unroll
        for (int j = 0; j < kPack; ++j) values[j] = now[j];
      } else {
        const int wanted = place + 1 + k < Width ? place + 1 + k : place + 1 + k - Width;
#pragma unroll
        for (int slot = 0; slot < Width; ++slot) {
          float held[kPack];
          kept[slot].unpack(held);
#pragma unroll
          for (int j = 0; j < kPack; ++j) values[j] = slot == wanted ? held[j] : values[j];
        }
      }
#pragma unroll
      for (int j = 0; j < kPack; ++j) sum[j] += weight[j] * values[j];
    }
    if (of_x) store_values(window + place * stride, now);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[j] = silu(sum[j]);
    store_values(filtered, sum);
  };
  filter_channels();
#pragma unroll 1
  for (int item = threadIdx.x + Threads; item < kItems; item += Threads) {
    load_channels(item);
    filter_channels();
  }
  if (head == 0 && begin == 0) {  // of all groups, also of those that no head here reads
#pragma unroll 1
    for (int c = threadIdx.x; c < kGrouped; c += Threads) {
      window_bc[(row * Width + place) * kGrouped + c] =
          from_float<Window>(to_float(from_float<Value>(scale * projected[2 * AllHeads * P + c])));
    }
  }
  const float step = clamp(softplus(scale * dt + shift), low, high), keep = expf(step * rate);
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
    if (Gates) out *= silu(scale * gate[i]);
    y[(long long)row_and_head * P + first + own + i] = from_float<Value>(out);
  }
}
