// Tokens of Mamba-3, SISO or MIMO, in one kernel: the matrix of every head is read once and written once, in place, for
// one token as for several. In turn:
//
//   phi    = phi + pi tanh(angles) dt                   lambda = sigmoid(trap)
//   q~, k~ = rotations by phi of q + q_bias, k + k_bias   v_r = mimo_v_r v
//   S      = exp(adt) S + exp(adt) (1 - lambda) dt sum_r last v_r last k~_r^T + lambda dt sum_r v_r k~_r^T
//   o_r    = S q~_r + D v_r, then the norm over P, the gate and the fold of the ranks
//
// A block owns one head of one row, so that the four parts of its state can be replaced where they are: nobody else
// reads them. A unit of neighbouring lanes, one per 16 bytes of a row of S where there are enough, takes Rows rows at a
// time. Everything is loaded before anything is used, what is used first comes first: what the token needs beside S is
// prepared in shared memory, by all threads, while the first rows are on their way. Sums have a fixed order that the
// sizes alone decide.
//
// Several tokens find the whole matrix in registers, and what the next one brings is loaded while this one is worked
// on. That work is bound by instructions, not by bytes, so a row has fewer lanes then, which sum more of it themselves,
// in the same order. Between two tokens the state takes the types that it has in memory. So all bits are those of a
// call for each token.

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
// Whole: units never have rows beyond P. Fold: sums are those of a row with so many times as many lanes.
template <typename State, int P, int N, int Rows, int Lanes, int Fold, bool Whole, bool Streaming>
struct Tile {
  static constexpr bool kWhole = Whole;
  static constexpr int kWidth = common_divisor(N, 16 / int(sizeof(State)));
  static constexpr int kVectors = N / kWidth;
  static constexpr int kPerLane = ceiling(kVectors, Lanes);
  using Words = Pack<State, kWidth>;
  Words words[Rows][kPerLane];
  float values[Rows][kPerLane][kWidth];

  __device__ static constexpr int offset(int row, int i) { return row * N + i * Lanes * kWidth; }
  __device__ static bool inside(int first, int row, int lane, int i) {
    return (Whole || first + row < P) && (kVectors % Lanes == 0 || i * Lanes + lane < kVectors);
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

  // The values as they are kept in memory.
  __device__ void pack() {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) words[row][i].pack(values[row][i]);
    }
  }

  __device__ void store_rows(State* mine, int first, int lane) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
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

  // The words times a number.
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

  // values += v key^T. The rounding is written out: the compiler's choice of which product to fuse depends on its
  // surroundings, and one token and several are to round alike.
  __device__ void add_outer(const float (&v)[Rows], const float (&key)[kPerLane][kWidth]) {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[row][i][j] = fmaf(v[row], key[i][j], values[row][i][j]);
      }
    }
  }

  // This lane's part of values . query, row by row.
  __device__ void dot(float* sums, const float (&query)[kPerLane][kWidth]) const {
#pragma unroll
    for (int row = 0; row < Rows; ++row) {
      float parts[Fold] = {};
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) parts[i % Fold] += values[row][i][j] * query[i][j];
      }
#pragma unroll
      for (int half = Fold / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
      }
      sums[row] = parts[0];
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
      if (share.owner && (TileOf::kWhole || row < P)) out[From + (share.first + i) / Rows][row] = sums[i];
    }
    read_out<From + kRanks, R, P, N, Rows, Lanes>(tile, queries, out, first, lane);
  }
}

}  // namespace

// state_angle [batch, Heads, Pairs]; state_ssm [batch, Heads, P, N]; state_k [batch, Heads, R, N];
// state_v [batch, Heads, P]; v, z [batch, tokens, Heads, P]; q, k [batch, tokens, R, Groups, N];
// angles [batch, tokens, Heads, Pairs]; adt, dt, trap [batch, Heads, tokens]; q_bias, k_bias [1 or batch, Heads, R, N];
// mimo_v, mimo_o, mimo_z [1 or batch, Heads, R, P]; D [1 or batch, Heads]; norm_weight [1 or batch, Heads, P];
// y [batch, tokens, Heads, P], or [batch, tokens, R, Heads, P] unless Folds. tokens is 1 unless Several, which wants
// Rows for every unit of lanes to cover P. Absent arrays are not touched; without HasRanks R is 1. One block for each
// head of each row. Rows: a power of two. Streaming: pass S by the caches, for states that they cannot hold from one
// token to the next.
template <typename Value, typename MatrixState, typename KeyState, typename ValueState, int Heads, int Groups, int R,
          int P, int N, int Pairs, bool Half, bool SharedParams, bool HasRanks, bool Folds, bool HasZ, bool HasD,
          bool HasNorm, bool Several, int Rows, int Threads, bool Streaming>
__global__ void __launch_bounds__(Threads, Several ? larger(1, (Threads > 128 ? 512 : 384) / Threads) : 0)
    mamba3_step(float* state_angle, MatrixState* state_ssm, KeyState* state_k, ValueState* state_v, const Value* q,
                const Value* k, const Value* v, const float* q_bias, const float* k_bias, const float* angles,
                const float* adt, const float* dt, const float* trap, const float* mimo_v, const float* mimo_o,
                const Value* z, const float* mimo_z, const float* D, const float* norm_weight, Value* y, float norm_eps,
                int given_tokens) {
  constexpr int kMostLanes = smaller(32, power_of_two(N / common_divisor(N, 16 / int(sizeof(MatrixState)))));
  constexpr int kLanes = Several ? smaller(kMostLanes, 8) : kMostLanes;
  constexpr int kUnits = Threads / kLanes;
  constexpr int kBlocks = ceiling(P, Rows);
  constexpr int kTurns = ceiling(kBlocks, kUnits);
  constexpr int kPaddedP = kBlocks * Rows;
  static_assert(!Several || kTurns == 1, "several tokens want the whole matrix in registers");
  using TileOf = Tile<MatrixState, P, N, Rows, kLanes, kMostLanes / kLanes, P % (kUnits * Rows) == 0, Streaming>;

  struct Shared {
    alignas(16) float last_values[R][kPaddedP];  // times the weights of their keys, as the next
    alignas(16) float values[R][kPaddedP];
    alignas(16) float last_keys[R * N];
    alignas(16) float keys[R * N];
    alignas(16) float queries[R * N];
    float skips[R][P], gates[R][P], out[R][P], inverse_norms[R];
  };
  __shared__ Shared shared;

  const unsigned thread = threadIdx.x;
  const int lane = thread % kLanes, unit = thread / kLanes;
  const long long own = blockIdx.x;  // row and head
  const int head = blockIdx.x % Heads;
  const long long row = blockIdx.x / Heads;
  const long long param = SharedParams ? head : own;
  const int tokens = Several ? given_tokens : 1;
  const long long first_token = row * tokens, first_value = first_token * Heads + head;
  const long long group = first_token * R * Groups + head / (Heads / Groups);  // of rank 0

  state_ssm += own * P * N + unit * Rows * N + lane * TileOf::kWidth;
  state_k += own * R * N;
  state_v += own * P;
  v += first_value * P;

  // Pair by pair of coordinates, then cell by cell of [R, P].
  TileOf tile;
  constexpr int kPairs = R * (N / 2), kPairsEach = ceiling(kPairs, Threads);
  const auto pair_of = [&](int i) { return unsigned(thread + i * Threads) % (N / 2); };
  const auto place_of = [&](int i, int side) {  // in [R, N]
    const unsigned rank = unsigned(thread + i * Threads) / (N / 2), pair = pair_of(i);
    return rank * N + (Half ? pair + side * (N / 2) : 2 * pair + side);
  };
  q += group * N;
  k += group * N;
  q_bias += param * R * N;
  k_bias += param * R * N;
  state_angle += own * Pairs;
  angles += first_value * Pairs;
  mimo_v += param * R * P;
  mimo_o += param * R * P;
  mimo_z += param * R * P;
  norm_weight += param * P;
  z += first_value * P;
  adt += own * tokens;
  dt += own * tokens;
  trap += own * tokens;
  constexpr int kCells = R * P, kCellsEach = ceiling(kCells, Threads);
  // Pairs of a thread that have angles of their own: those of other ranks are the same ones.
  constexpr int kAngles = Threads % (N / 2) == 0 ? 1 : kPairsEach;
  Value new_q[kPairsEach][2], new_k[kPairsEach][2], new_v[kCellsEach], new_z[kCellsEach];
  KeyState last_k[kPairsEach][2];
  ValueState last_v[kCellsEach];
  float bias_q[kPairsEach][2], bias_k[kPairsEach][2], last_angle[kAngles], rate[kAngles];
  float expand[kCellsEach], expand_z[kCellsEach], fold[kCellsEach], norm[kCellsEach];
  float step, logit, log_decay;
  const auto load = [&](bool first) {  // what the first token needs, or only what changes from token to token
#pragma unroll
    for (int i = 0; i < kPairsEach; ++i) {
      if (i < kAngles && thread + i * Threads < kPairs && pair_of(i) < Pairs) {
        if (first) last_angle[i] = state_angle[pair_of(i)];
        rate[i] = angles[pair_of(i)];
      }
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (thread + i * Threads < kPairs) {
          const unsigned place = place_of(i, side), token = place / N * (Groups * N) + place % N;
          new_q[i][side] = q[token];
          new_k[i][side] = k[token];
          if (first) {
            last_k[i][side] = state_k[place];
            bias_q[i][side] = q_bias[place];
            bias_k[i][side] = k_bias[place];
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kCellsEach; ++i) {
      const unsigned cell = thread + i * Threads;
      if (cell < kCells) {
        new_v[i] = v[cell % P];
        if (first) last_v[i] = state_v[cell % P];
        if (HasZ) new_z[i] = z[cell % P];
        if (first && HasNorm) norm[i] = norm_weight[cell % P];
        if (first && HasRanks) expand[i] = mimo_v[cell];
        if (first && HasRanks && HasZ) expand_z[i] = mimo_z[cell];
        if (first && Folds) fold[i] = mimo_o[cell];
      }
    }
    step = *dt;
    logit = *trap;
    log_decay = *adt;
  };
  load(true);
  const float skip = HasD ? D[param] : 0.0f;
  tile.load_rows(state_ssm, unit * Rows, lane);
  __syncthreads();

#pragma unroll 1
  for (int t = 0; t < tokens; ++t) {
    const bool last = t + 1 == tokens;
    const float keep = expf(log_decay), gamma = sigmoid(logit) * step, beta = keep * (sigmoid(-logit) * step);
#pragma unroll
    for (int i = 0; i < kCellsEach; ++i) {
      const unsigned cell = thread + i * Threads, r = cell / P, p = cell % P;
      if (cell < kCells) {
        const float now = (HasRanks ? expand[i] : 1.0f) * to_float(new_v[i]);
        shared.values[r][p] = gamma * now;
        shared.last_values[r][p] = beta * ((HasRanks ? expand[i] : 1.0f) * to_float(last_v[i]));
        shared.skips[r][p] = skip * now;
        float gate = 1.0f;
        if (HasZ) {
          gate = (HasRanks ? expand_z[i] : 1.0f) * to_float(new_z[i]);
          gate *= sigmoid(gate);
        }
        if (HasNorm) gate *= norm[i];
        if (Folds) gate *= fold[i];
        shared.gates[r][p] = gate;
        last_v[i] = from_float<ValueState>(to_float(new_v[i]));
        if (last && r == 0) state_v[p] = last_v[i];  // all have read it
      }
    }

    float sine[kAngles], cosine[kAngles];
#pragma unroll
    for (int i = 0; i < kPairsEach; ++i) {
      if (thread + i * Threads < kPairs) {
        const unsigned first = place_of(i, 0), second = place_of(i, 1), pair = pair_of(i);
        float qa = to_float(new_q[i][0]) + bias_q[i][0], qb = to_float(new_q[i][1]) + bias_q[i][1];
        float ka = to_float(new_k[i][0]) + bias_k[i][0], kb = to_float(new_k[i][1]) + bias_k[i][1];
        if (pair < Pairs) {
          if (i < kAngles) {
            const float turns = turns_of_step(rate[i], step);
            const unsigned phase = phase_of_radians(last_angle[i]) + phase_of_turns(turns);
            sincos_of_phase(phase, sine[i], cosine[i]);
            const float unknown = (last_angle[i] - last_angle[i]) + (turns - turns);  // 0, or NaN if one is not finite
            sine[i] += unknown;
            cosine[i] += unknown;
            last_angle[i] = radians_of_phase(phase) + unknown;
            if (last && thread + i * Threads < N / 2) state_angle[pair] = last_angle[i];
          }
          rotate(qa, qb, sine[i % kAngles], cosine[i % kAngles]);
          rotate(ka, kb, sine[i % kAngles], cosine[i % kAngles]);
        }
        shared.queries[first] = qa;
        shared.queries[second] = qb;
        shared.keys[first] = ka;
        shared.keys[second] = kb;
        shared.last_keys[first] = to_float(last_k[i][0]);
        shared.last_keys[second] = to_float(last_k[i][1]);
        last_k[i][0] = from_float<KeyState>(ka);
        last_k[i][1] = from_float<KeyState>(kb);
        if (last) state_k[first] = last_k[i][0];
        if (last) state_k[second] = last_k[i][1];
      }
    }
    __syncthreads();

    if (!last) {
      q += R * Groups * N;
      k += R * Groups * N;
      v += Heads * P;
      z += Heads * P;
      angles += Heads * Pairs;
      ++adt;
      ++dt;
      ++trap;
      load(false);
    }
#pragma unroll 1
    for (int turn = 0; turn < kTurns; ++turn) {
      const int first = (turn * kUnits + unit) * Rows;
      const int from = smaller(first, kPaddedP - Rows);  // units without rows read some, for the shuffles' sake
      tile.scale(keep);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        float key[TileOf::kPerLane][TileOf::kWidth], value[Rows];
        load_values(value, &shared.last_values[r][from]);
        TileOf::load_part(key, shared.last_keys + r * N, lane);
        tile.add_outer(value, key);
        load_values(value, &shared.values[r][from]);
        TileOf::load_part(key, shared.keys + r * N, lane);
        tile.add_outer(value, key);
      }
      tile.pack();
      if (last) tile.store_rows(state_ssm, first, lane);
      read_out<0, R, P, N, Rows, kLanes>(tile, shared.queries, shared.out, first, lane);
      if (turn + 1 < kTurns) {
        state_ssm += kUnits * Rows * N;
        tile.load_rows(state_ssm, first + kUnits * Rows, lane);
      }
    }
    __syncthreads();

    if (HasNorm) {
      for (int r = thread / 32; r < R; r += Threads / 32) {
        float squares = 0.0f;
        for (int p = thread % 32; p < P; p += 32) {
          const float o = shared.out[r][p] + shared.skips[r][p];
          squares += o * o;
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) squares += __shfl_xor_sync(0xffffffff, squares, offset);
        if (thread % 32 == 0) shared.inverse_norms[r] = rsqrtf(squares / P + norm_eps);
      }
      __syncthreads();
    }

    const auto emitted = [&](int r, int p) {
      const float o = shared.out[r][p] + shared.skips[r][p];
      return (HasNorm ? o * shared.inverse_norms[r] : o) * shared.gates[r][p];
    };
    if (!HasRanks || Folds) {
#pragma unroll 1
      for (int p = thread; p < P; p += Threads) {
        float sum = 0.0f;
#pragma unroll
        for (int r = 0; r < R; ++r) sum += emitted(r, p);
        y[((first_token + t) * Heads + head) * P + p] = from_float<Value>(sum);
      }
    } else {
#pragma unroll 1
      for (int i = thread; i < R * P; i += Threads) {
        const int r = i / P, p = i % P;
        y[(((first_token + t) * R + r) * Heads + head) * P + p] = from_float<Value>(emitted(r, p));
      }
    }
    if (Several) __syncthreads();  // what the next token prepares replaces what was read here
  }
}
