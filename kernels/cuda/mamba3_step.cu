// One token of Mamba-3, SISO or MIMO, in one kernel: the matrix of every head is read once and written once, in place.
//
//   phi    = phi + pi tanh(angles) dt                   lambda = sigmoid(trap)
//   q~, k~ = rotations by phi of q + q_bias, k + k_bias   v_r = mimo_v_r v
//   S      = exp(adt) S + exp(adt) (1 - lambda) dt sum_r last v_r last k~_r^T + lambda dt sum_r v_r k~_r^T
//   o_r    = S q~_r + D v_r, then the norm over P, the gate and the fold of the ranks
//
// A block owns one head of one row, so that the four parts of its state can be replaced where they are: nobody else
// reads them. Neighbouring lanes share rows of S, Rows of them at a time, whose loads are under way before anything
// else begins. What the token needs beside S is prepared in shared memory in the meantime, each kind by warps of its
// own and several numbers at a time: of 1,230 instructions a warp 480 went there when all warps did all of it. Sums
// have a fixed order that the sizes and Lanes decide.

#include "mamba3_phase.cuh"
#include "packs.cuh"

namespace {

using namespace jax_ssd;

__device__ __forceinline__ float sigmoid(float v) { return __fdividef(1.0f, 1.0f + expf(-v)); }

// Where the sums of Held values over Lanes lanes are afterwards. While a lane holds an even number of them, a pair of
// lanes swaps halves, which costs half as much as summing all of them twice.
struct Share {
  int first;   // of the values whose sums this lane holds
  bool owner;  // of several lanes with the same sums, the one that writes them
};

template <int Held, int Offset>
__device__ __forceinline__ Share sum_over_lanes(float* values, int lane, Share share = {0, true}) {
  if constexpr (Offset == 0) {
    return share;
  } else {
    const bool upper = lane & Offset;
    if constexpr (Held % 2 == 0) {
#pragma unroll
      for (int i = 0; i < Held / 2; ++i) {
        const float kept = upper ? values[i + Held / 2] : values[i];
        const float given = upper ? values[i] : values[i + Held / 2];
        values[i] = kept + __shfl_xor_sync(0xffffffff, given, Offset);
      }
      if (upper) share.first += Held / 2;
      return sum_over_lanes<Held / 2, Offset / 2>(values, lane, share);
    } else {
#pragma unroll
      for (int i = 0; i < Held; ++i) values[i] += __shfl_xor_sync(0xffffffff, values[i], Offset);
      if (upper) share.owner = false;
      return sum_over_lanes<Held, Offset / 2>(values, lane, share);
    }
  }
}

__device__ constexpr int values_left(int held, int offset) {
  return offset == 0 ? held : values_left(held % 2 == 0 ? held / 2 : held, offset / 2);
}

// Rows of S in the registers of a unit of lanes; `first` is the unit's first row, `mine` this lane's part of it.
template <typename State, int P, int N, int Rows, int Lanes, bool Streaming>
struct Tile {
  static constexpr int kWidth = common_divisor(N, 16 / int(sizeof(State)));
  static constexpr int kVectors = N / kWidth;
  static constexpr int kPerLane = ceiling(kVectors, Lanes);
  using Words = Pack<State, kWidth>;
  Words words[Rows][kPerLane];
  float values[Rows][kPerLane][kWidth];

  __device__ static constexpr int offset(int row, int i) { return row * N + i * Lanes * kWidth; }
  __device__ static bool inside(int first, int row, int lane, int i) {
    return (P % Rows == 0 || first + row < P) && first < P && (kVectors % Lanes == 0 || i * Lanes + lane < kVectors);
  }

  __device__ void load_rows(const State* mine, int first, int lane) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        words[row][i] = {};
        if (inside(first, row, lane, i)) words[row][i].template load<Streaming>(mine + offset(row, i));
      }
    }
  }

  __device__ void store_rows(State* mine, int first, int lane) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        words[row][i].pack(values[row][i]);
        if (inside(first, row, lane, i)) words[row][i].template store<Streaming>(mine + offset(row, i));
      }
    }
  }

  // This lane's part of a row of N floats in shared memory.
  __device__ static void load_part(float (&part)[kPerLane][kWidth], const float* row, int lane) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (kVectors % Lanes == 0 || i * Lanes + lane < kVectors) {
        load_values(part[i], row + (i * Lanes + lane) * kWidth);
      } else {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) part[i][j] = 0.0f;
      }
    }
  }

  // The loaded words times a number.
  __device__ void scale(float by) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        words[row][i].unpack(values[row][i]);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[row][i][j] *= by;
      }
    }
  }

  // values += v key^T
  __device__ void add_outer(const float (&v)[Rows], const float (&key)[kPerLane][kWidth]) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[row][i][j] += v[row] * key[i][j];
      }
    }
  }

  // This lane's part of values . query, row by row.
  __device__ void dot(float* sums, const float (&query)[kPerLane][kWidth]) const {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) sum += values[row][i][j] * query[i][j];
      }
      sums[row] = sum;
    }
  }
};

// Out of a tile, for ranks From and following: out[r][first + row] = values . queries[r].
template <int From, int R, int P, int N, int Rows, int Lanes, typename TileOf>
__device__ __forceinline__ void read_out(const TileOf& tile, const float* queries, float (*out)[P], int first,
                                         int lane) {
  if constexpr (From < R) {
    constexpr int kRanks = smaller(R - From, 4);  // at a time: their sums are as many registers as the tile has
    float sums[kRanks * Rows];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
      float query[TileOf::kPerLane][TileOf::kWidth];
      TileOf::load_part(query, queries + (From + r) * N, lane);
      tile.dot(sums + r * Rows, query);
    }
    const Share share = sum_over_lanes<kRanks * Rows, Lanes / 2>(sums, lane);
#pragma unroll
    for (int i = 0; i < values_left(kRanks * Rows, Lanes / 2); ++i) {
      const int row = first + (share.first + i) % Rows;
      if (share.owner && row < P) out[From + (share.first + i) / Rows][row] = sums[i];
    }
    read_out<From + kRanks, R, P, N, Rows, Lanes>(tile, queries, out, first, lane);
  }
}

template <typename T, int Width>
__device__ __forceinline__ void sum_of(float (&sum)[2 * Width], const Pack<T, Width> (&one)[2],
                                       const Pack<float, Width> (&other)[2]) {
  float a[Width], b[Width];
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    one[side].unpack(a);
    other[side].unpack(b);
#pragma unroll
    for (int j = 0; j < Width; ++j) sum[side * Width + j] = a[j] + b[j];
  }
}

}  // namespace

// state_angle [batch, Heads, Pairs]; state_ssm [batch, Heads, P, N]; state_k [batch, Heads, R, N];
// state_v, v, z [batch, Heads, P]; q, k [batch, R, Groups, N]; q_bias, k_bias [1 or batch, Heads, R, N];
// angles [batch, Heads, Pairs]; adt, dt, trap [batch, Heads]; mimo_v, mimo_o, mimo_z [1 or batch, Heads, R, P];
// D [1 or batch, Heads]; norm_weight [1 or batch, Heads, P]; y [batch, Heads, P], or [batch, R, Heads, P] unless Folds.
// Absent arrays are not touched; without HasRanks R is 1. One block for each head of each row. Rows, Lanes: powers of
// two. Streaming: pass S by the caches, for states that they cannot hold from one token to the next.
template <typename Value, typename MatrixState, typename KeyState, typename ValueState, int Heads, int Groups, int R,
          int P, int N, int Pairs, bool Half, bool SharedParams, bool HasRanks, bool Folds, bool HasZ, bool HasD,
          bool HasNorm, int Rows, int Lanes, int Threads, bool Streaming>
__global__ void __launch_bounds__(Threads, larger(1, 768 / Threads))
    mamba3_step(float* state_angle, MatrixState* state_ssm, KeyState* state_k, ValueState* state_v, const Value* q,
                const Value* k, const Value* v, const float* q_bias, const float* k_bias, const float* angles,
                const float* adt, const float* dt, const float* trap, const float* mimo_v, const float* mimo_o,
                const Value* z, const float* mimo_z, const float* D, const float* norm_weight, Value* y,
                float norm_eps) {
  constexpr int kUnits = Threads / Lanes;
  constexpr int kBlocks = ceiling(P, Rows);
  constexpr int kTurns = ceiling(kBlocks, kUnits);
  constexpr int kPaddedP = kBlocks * Rows;
  using TileOf = Tile<MatrixState, P, N, Rows, Lanes, Streaming>;

  __shared__ float cosines[larger(1, Pairs)], sines[larger(1, Pairs)], inverse_norms[R];
  __shared__ __align__(16) float last_keys[R * N], keys[R * N], queries[R * N];
  __shared__ __align__(16) float last_values[R][kPaddedP], values[R][kPaddedP];  // times the weights of their keys
  __shared__ __align__(16) float skips[R][P], gates[R][P], out[R][P];

  const int thread = threadIdx.x, lane = thread % Lanes, unit = thread / Lanes;
  const long long own = blockIdx.x;  // row and head
  const int head = blockIdx.x % Heads;
  const long long row = blockIdx.x / Heads;
  const long long param = SharedParams ? head : own;
  const long long group = row * R * Groups + head / (Heads / Groups);  // of rank 0

  TileOf tile;
  MatrixState* mine = state_ssm + own * P * N + unit * Rows * N + lane * TileOf::kWidth;
  tile.load_rows(mine, unit * Rows, lane);
  __syncthreads();  // keeps the compiler from putting loads off

  state_k += own * R * N;
  state_v += own * P;
  v += own * P;
  const float step = dt[own], logit = trap[own], log_decay = adt[own], skip = HasD ? D[param] : 0.0f;
  const float keep = expf(log_decay);

  // Items of each kind start at a warp of their own and go around the block: neighbouring pairs of coordinates of one
  // rank, neighbouring cells of [R, P], then rotary phases.
  constexpr int kPairPack = common_divisor(N / 2, 2), kPairPacks = N / 2 / kPairPack;
  constexpr int kPairItems = R * kPairPacks, kPairsEach = ceiling(kPairItems, Threads);
  constexpr int kCellPack = common_divisor(P, 2), kCellPacks = P / kCellPack, kCellItems = R * kCellPacks;
  constexpr int kFirstCell = ceiling(kPairItems, 32) * 32, kFirstPhase = kFirstCell + ceiling(kCellItems, 32) * 32;
  const int cell_thread = (thread - kFirstCell) & (Threads - 1), phase_thread = (thread - kFirstPhase) & (Threads - 1);

  const auto place_of = [&](int item, int side) {  // in [R, N]; the two coordinates of a pair, or half of its pairs
    const int rank = item / kPairPacks, first = item % kPairPacks * kPairPack;
    return rank * N + (Half ? first + side * (N / 2) : 2 * first + side * kPairPack);
  };
  Pack<Value, kPairPack> new_q[kPairsEach][2], new_k[kPairsEach][2];
  Pack<KeyState, kPairPack> last_k[kPairsEach][2];
  Pack<float, kPairPack> bias_q[kPairsEach][2], bias_k[kPairsEach][2];
#pragma unroll
  for (int i = 0; i < kPairsEach; ++i) {
    const int item = thread + i * Threads;
    if (item < kPairItems) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int place = place_of(item, side);
        const long long token = (group + (long long)(place / N) * Groups) * N + place % N;
        new_q[i][side].load(q + token);
        new_k[i][side].load(k + token);
        last_k[i][side].load(state_k + place);
        bias_q[i][side].load(q_bias + param * R * N + place);
        bias_k[i][side].load(k_bias + param * R * N + place);
      }
    }
  }

  for (int item = phase_thread; item < Pairs; item += Threads) {
    const float last = state_angle[own * Pairs + item], turns = turns_of_step(angles[own * Pairs + item], step);
    const unsigned phase = phase_of_radians(last) + phase_of_turns(turns);
    float sine, cosine;
    sincos_of_phase(phase, sine, cosine);
    const float unknown = (last - last) + (turns - turns);  // 0, or NaN if either is not finite
    cosines[item] = cosine + unknown;
    sines[item] = sine + unknown;
    state_angle[own * Pairs + item] = radians_of_phase(phase) + unknown;
  }

  for (int item = cell_thread; item < kCellItems; item += Threads) {
    const int r = item / kCellPacks, p = item % kCellPacks * kCellPack;
    const float gamma = sigmoid(logit) * step, beta = keep * (sigmoid(-logit) * step);
    float now[kCellPack], last[kCellPack], gate[kCellPack], other[kCellPack];
    load_values(now, v + p);
    load_values(last, state_v + p);
    if (HasRanks) {
      load_values(other, mimo_v + param * R * P + r * P + p);
#pragma unroll
      for (int j = 0; j < kCellPack; ++j) {
        now[j] *= other[j];
        last[j] *= other[j];
      }
    }
#pragma unroll
    for (int j = 0; j < kCellPack; ++j) gate[j] = 1.0f;
    if (HasZ) {
      load_values(gate, z + own * P + p);
      if (HasRanks) load_values(other, mimo_z + param * R * P + r * P + p);
#pragma unroll
      for (int j = 0; j < kCellPack; ++j) {
        if (HasRanks) gate[j] *= other[j];
        gate[j] *= sigmoid(gate[j]);
      }
    }
    if (HasNorm) {
      load_values(other, norm_weight + param * P + p);
#pragma unroll
      for (int j = 0; j < kCellPack; ++j) gate[j] *= other[j];
    }
    if (Folds) {
      load_values(other, mimo_o + param * R * P + r * P + p);
#pragma unroll
      for (int j = 0; j < kCellPack; ++j) gate[j] *= other[j];
    }
    store_values(&gates[r][p], gate);
#pragma unroll
    for (int j = 0; j < kCellPack; ++j) other[j] = skip * now[j];
    store_values(&skips[r][p], other);
#pragma unroll
    for (int j = 0; j < kCellPack; ++j) {
      now[j] *= gamma;
      last[j] *= beta;
    }
    store_values(&values[r][p], now);
    store_values(&last_values[r][p], last);
  }
  __syncthreads();

#pragma unroll
  for (int i = 0; i < kPairsEach; ++i) {
    const int item = thread + i * Threads;
    if (item < kPairItems) {
      float rotated_q[2 * kPairPack], rotated_k[2 * kPairPack], part[kPairPack];
      sum_of(rotated_q, new_q[i], bias_q[i]);
      sum_of(rotated_k, new_k[i], bias_k[i]);
#pragma unroll
      for (int j = 0; j < kPairPack; ++j) {
        const int pair = item % kPairPacks * kPairPack + j;
        const int a = Half ? j : 2 * j, b = Half ? j + kPairPack : 2 * j + 1;
        if (pair < Pairs) {
          rotate(rotated_q[a], rotated_q[b], sines[pair], cosines[pair]);
          rotate(rotated_k[a], rotated_k[b], sines[pair], cosines[pair]);
        }
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const int place = place_of(item, side);
        const auto half = [&](const float* of) {
#pragma unroll
          for (int j = 0; j < kPairPack; ++j) part[j] = of[side * kPairPack + j];
        };
        half(rotated_q);
        store_values(queries + place, part);
        half(rotated_k);
        store_values(keys + place, part);
        store_values(state_k + place, part);
        last_k[i][side].unpack(part);
        store_values(last_keys + place, part);
      }
    }
  }
  for (int p = cell_thread * kCellPack; p < P; p += Threads * kCellPack) {  // all have read the last one
    float now[kCellPack];
    load_values(now, v + p);
    store_values(state_v + p, now);
  }
  __syncthreads();

#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    const int first = (turn * kUnits + unit) * Rows;
    const int from = smaller(first, kPaddedP - Rows);  // units without rows read some, for the shuffles' sake
    tile.scale(keep);
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float key[TileOf::kPerLane][TileOf::kWidth], value[Rows];
      load_values(value, &last_values[r][from]);
      TileOf::load_part(key, last_keys + r * N, lane);
      tile.add_outer(value, key);
      load_values(value, &values[r][from]);
      TileOf::load_part(key, keys + r * N, lane);
      tile.add_outer(value, key);
    }
    tile.store_rows(mine, first, lane);
    read_out<0, R, P, N, Rows, Lanes>(tile, queries, out, first, lane);
    mine += kUnits * Rows * N;
    if (turn + 1 < kTurns) tile.load_rows(mine, first + kUnits * Rows, lane);
  }
  __syncthreads();

  if (HasNorm) {
    for (int r = thread / 32; r < R; r += Threads / 32) {
      float squares = 0.0f;
      for (int p = thread % 32; p < P; p += 32) {
        const float o = out[r][p] + skips[r][p];
        squares += o * o;
      }
#pragma unroll
      for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffff, squares, offset);
      if (thread % 32 == 0) inverse_norms[r] = rsqrtf(squares / P + norm_eps);
    }
    __syncthreads();
  }

  constexpr bool kOneRow = !HasRanks || Folds;  // for all ranks
#pragma unroll 1
  for (int item = thread; item < (kOneRow ? kCellPacks : kCellItems); item += Threads) {
    const int p = item % kCellPacks * kCellPack;
    float sum[kCellPack] = {}, o[kCellPack], other[kCellPack];
#pragma unroll
    for (int i = 0; i < (kOneRow ? R : 1); ++i) {
      const int r = kOneRow ? i : item / kCellPacks;
      load_values(o, &out[r][p]);
      load_values(other, &skips[r][p]);
#pragma unroll
      for (int j = 0; j < kCellPack; ++j) o[j] += other[j];
      load_values(other, &gates[r][p]);
#pragma unroll
      for (int j = 0; j < kCellPack; ++j) sum[j] += (HasNorm ? o[j] * inverse_norms[r] : o[j]) * other[j];
    }
    store_values(kOneRow ? y + own * P + p : y + ((row * R + item / kCellPacks) * Heads + head) * P + p, sum);
  }
}
