// One token of Mamba-2: the state is read once and written once, in place.
//
//   state = exp(A step) state + (step x) B,   y = (C . state + D x) silu(z),   step = clamp(softplus?(dt + dt_bias))
//
// A unit is a power of two of neighbouring lanes, one per 16 bytes of a row of the state where there are enough of
// them. It owns Rows neighbouring rows (channels of one head), so that a thread has Rows loads of the state under way
// before it needs the first. Each output is one sum over the lanes in a fixed order that depends on nothing but N.

#include "mamba2_step.cuh"

using namespace jax_ssd;

// state [batch, Heads, P, N]; x, z, y [batch, Heads, P]; dt [batch, Heads]; B, C [batch, Groups, N];
// A, dt_bias [1 or batch, Heads]; D [1 or batch, Heads, P]. Absent arrays are not touched.
// units: batch * Heads * ceil(P / Rows), below 2^31. Rows, Threads: powers of two.
template <typename Value, typename Dt, typename State, int Heads, int Groups, int P, int N, bool SharedParams,
          bool HasD, bool HasZ, bool HasBias, bool Softplus, int Rows, int Threads>
__global__ void __launch_bounds__(Threads)
    mamba2_step(State* state, const Value* x, const Dt* dt, const float* A, const Value* B, const Value* C,
                const float* D, const Value* z, const float* dt_bias, Value* y, unsigned units, float low, float high) {
  constexpr int kWidth = common_divisor(N, 16 / int(sizeof(State)));  // values that one load of the state moves
  constexpr int kVectors = N / kWidth;
  constexpr int kLanes = smaller(32, power_of_two(kVectors));
  constexpr int kPerLane = (kVectors + kLanes - 1) / kLanes;
  constexpr int kAtOnce = smaller(kPerLane, larger(1, 8 / Rows));  // of them in registers
  constexpr bool kWholeVectors = kVectors % (kLanes * kAtOnce) == 0;
  constexpr bool kWholeRows = P % Rows == 0;
  constexpr int kBlocks = (P + Rows - 1) / Rows;
  using StatePack = Pack<State, kWidth>;
  using ValuePack = Pack<Value, kWidth>;

  const int lane = threadIdx.x % kLanes;
  const unsigned wanted = blockIdx.x * (Threads / kLanes) + threadIdx.x / kLanes;
  const bool live = wanted < units;
  const unsigned unit = live ? wanted : units - 1;  // the last block's spare lanes read, for the shuffles' sake
  const int first = int(unit % kBlocks) * Rows;
  const unsigned row_and_head = unit / kBlocks;
  const int head = row_and_head % Heads;
  const unsigned row = row_and_head / Heads;
  const int group = head / (Heads / Groups);
  const long long param = (SharedParams ? 0LL : (long long)row * Heads) + head;
  const long long channel = (long long)row_and_head * P + first;
  state += channel * N;
  B += ((long long)row * Groups + group) * N;
  C += ((long long)row * Groups + group) * N;

  // The one or more rows whose output this lane writes.
  constexpr int kHeld = larger(1, Rows / kLanes);
  constexpr int kSharing = larger(1, kLanes / Rows);  // lanes that hold the same sums
  const int own = lane / kSharing * kHeld;

  float sums[Rows] = {};
  float keep, enters[Rows], skip[kHeld], gate[kHeld];

#pragma unroll 1
  for (int begin = 0; begin < kVectors; begin += kLanes * kAtOnce) {
    const auto place = [&](int i) { return begin + i * kLanes + lane; };
    const auto inside = [&](int i, int r) {
      return (kWholeVectors || place(i) < kVectors) && (kWholeRows || first + r < P);
    };

    StatePack old[kAtOnce][Rows];
    ValuePack to_state[kAtOnce], to_output[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (inside(i, r)) old[i][r].load(state + (long long)r * N + place(i) * kWidth);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (inside(i, 0)) {
        to_state[i].load(B + place(i) * kWidth);
        to_output[i].load(C + place(i) * kWidth);
      }
    }
    Pack<Value, Rows> inputs;
    if (begin == 0) {
      if constexpr (kWholeRows) {
        inputs.load(x + channel);
      } else {
#pragma unroll
        for (int r = 0; r < Rows; ++r) enters[r] = first + r < P ? to_float(x[channel + r]) : 0.0f;
      }
    }
    // The loads above stay above: without a barrier the compiler puts some off until the step is known.
    __syncthreads();
    if (begin == 0) {
      if constexpr (kWholeRows) inputs.unpack(enters);
      float step = to_float(dt[row_and_head]);
      if (HasBias) step += dt_bias[param];
      const float rate = A[param];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const bool there = kWholeRows || first + own + i < P;
        skip[i] = HasD && there ? D[param * P + first + own + i] * to_float(x[channel + own + i]) : 0.0f;
        gate[i] = HasZ && there ? to_float(z[channel + own + i]) : 0.0f;
      }
      if (Softplus) step = softplus(step);
      step = clamp(step, low, high);
      keep = expf(step * rate);
#pragma unroll
      for (int r = 0; r < Rows; ++r) enters[r] *= step;
    }

#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      float b[kWidth], c[kWidth];
      to_state[i].unpack(b);
      to_output[i].unpack(c);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        if (!inside(i, r)) continue;
        float values[kWidth];
        old[i][r].unpack(values);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) {
          values[j] = keep * values[j] + enters[r] * b[j];
          sums[r] += values[j] * c[j];
        }
        old[i][r].pack(values);
        if (live) old[i][r].store(state + (long long)r * N + place(i) * kWidth);
      }
    }
  }

  sum_over_lanes<Rows, kLanes / 2>(sums, lane);
  if (!live || lane % kSharing != 0) return;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (!kWholeRows && first + own + i >= P) continue;
    float out = sums[i] + skip[i];
    if (HasZ) out *= gate[i] / (1.0f + expf(-gate[i]));
    y[channel + own + i] = from_float<Value>(out);
  }
}
