// Products of the tensor cores: mma.sync of a warp, wgmma of a warpgroup with operands found by their descriptors.
#pragma once

#include "collectives.h"
#include "numbers.h"

namespace emulator {

struct Bfloat16 {
  static constexpr int BYTES = 2;
  static float value(unsigned bits) { return bfloat16_value(bits); }
};
struct Half {
  static constexpr int BYTES = 2;
  static float value(unsigned bits) { return half_value(bits); }
};
// The low 13 bits of an operand are not looked at.
struct Tf32 {
  static constexpr int BYTES = 4;
  static float value(unsigned bits) { return bits_as<float>(bits & 0xFFFFE000u); }
};

// d (16 x 8) += a (16 x 16) b (16 x 8), 16-bit numbers in pairs.
template <class Format>
void mma_16(const char* what, float& d0, float& d1, float& d2, float& d3, const unsigned (&a)[4],
            const unsigned (&b)[2], const float (&c)[4]) {
  struct Operands {
    unsigned a[4], b[2];
    float d[4];
  } own;
  memcpy(own.a, a, sizeof a), memcpy(own.b, b, sizeof b), memcpy(own.d, c, sizeof c);
  meet_warp(what, ~0u, own, [](Operands** all) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < WARP; ++lane) {
      const int row = lane / 4, pair = lane % 4 * 2;
      for (int e = 0; e < 2; ++e) {
        for (int i = 0; i < 4; ++i) {
          a[row + i % 2 * 8][pair + i / 2 * 8 + e] = Format::value(all[lane]->a[i] >> (16 * e) & 0xFFFF);
        }
        for (int i = 0; i < 2; ++i) b[pair + i * 8 + e][row] = Format::value(all[lane]->b[i] >> (16 * e) & 0xFFFF);
      }
    }
    for (int lane = 0; lane < WARP; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
        all[lane]->d[i] += sum;
      }
    }
  });
  d0 = own.d[0], d1 = own.d[1], d2 = own.d[2], d3 = own.d[3];
}

// d (16 x 8) += a (16 x 8) b (8 x 8) in TF32.
inline void mma_tf32(const char* what, float& d0, float& d1, float& d2, float& d3, const unsigned (&a)[4],
                     const unsigned (&b)[2], const float (&c)[4]) {
  struct Operands {
    unsigned a[4], b[2];
    float d[4];
  } own;
  memcpy(own.a, a, sizeof a), memcpy(own.b, b, sizeof b), memcpy(own.d, c, sizeof c);
  meet_warp(what, ~0u, own, [](Operands** all) {
    float a[16][8], b[8][8];
    for (int lane = 0; lane < WARP; ++lane) {
      for (int i = 0; i < 4; ++i) a[lane / 4 + i % 2 * 8][lane % 4 + i / 2 * 4] = Tf32::value(all[lane]->a[i]);
      for (int i = 0; i < 2; ++i) b[lane % 4 + i * 4][lane / 4] = Tf32::value(all[lane]->b[i]);
    }
    for (int lane = 0; lane < WARP; ++lane) {
      for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 8; ++k) sum += a[row][k] * b[k][column];
        all[lane]->d[i] += sum;
      }
    }
  });
  d0 = own.d[0], d1 = own.d[1], d2 = own.d[2], d3 = own.d[3];
}

// A matrix descriptor of wgmma: an operand in shared memory, swizzled by 128 bytes or not at all. `along`: the summed
// dimension (K) runs along the rows ("K-major"), else the other one (M or N) does.
struct Descriptor {
  unsigned start, leading, stride, layout;
  explicit Descriptor(uint64_t bits)
      : start((bits & 0x3FFF) << 4),
        leading((bits >> 16 & 0x3FFF) << 4),
        stride((bits >> 32 & 0x3FFF) << 4),
        layout(bits >> 62) {
    if (layout > 1) fail_f("wgmma: only swizzles of 128 bytes or none are emulated, got layout %u", layout);
    if (bits >> 49 & 7) fail_f("wgmma: only a base offset of 0 is emulated, got %u", unsigned(bits >> 49 & 7));
  }
  // Of element (m or n, k), `bytes` each; the swizzle works on bits of the address itself.
  unsigned address(int mn, int k, bool along, int bytes) const {
    if (layout == 0) {
      if (!along) fail("wgmma: without a swizzle only operands along the summed dimension are emulated");
      return start + mn / 8 * stride + mn % 8 * 16 + k * bytes / 16 * leading + k * bytes % 16;
    }
    if (!along && bytes != 2) fail("wgmma: only operands of 16 bits run across the summed dimension");
    const unsigned at = along ? start + mn / 8 * stride + mn % 8 * 128 + k * bytes
                              : start + mn / 64 * leading + k / 8 * stride + k % 8 * 128 + mn % 64 * 2;
    return at ^ (at >> 3 & 0x70);
  }
};

template <class Format>
constexpr int DEPTH = 32 / Format::BYTES;  // of a product, in numbers

template <class Format>
std::vector<float> read_operand(uint64_t bits, int size, bool along) {  // [depth][size]
  const Descriptor descriptor(bits);
  std::vector<float> result(DEPTH<Format> * size);
  for (int mn = 0; mn < size; ++mn) {
    for (int k = 0; k < DEPTH<Format>; ++k) {
      unsigned value = 0;
      memcpy(&value, async_shared(descriptor.address(mn, k, along, Format::BYTES), Format::BYTES, Format::BYTES),
             Format::BYTES);
      result[k * size + mn] = Format::value(value);
    }
  }
  return result;
}

constexpr unsigned IN_FLIGHT = 0x7FC0DEAD;  // what registers of an accumulator hold until it is waited for

struct WgmmaOperands {
  float* d;
  unsigned a[4];
  uint64_t a_descriptor, b_descriptor;
  bool accumulate;
};

// Issues d (64 x columns) += a b. The product is made when it is waited for.
template <class Format>
void wgmma(int columns, bool a_in_registers, bool a_along, bool b_along, WgmmaOperands own) {
  meet_warpgroup(a_in_registers ? "wgmma (registers)" : "wgmma (shared)", own, [=](WgmmaOperands** all) {
    Warpgroup& group = own_block().warpgroups[current->number / WARPGROUP];
    const WgmmaOperands& first = *all[0];
    for (int t = 1; t < WARPGROUP; ++t) {
      if (all[t]->b_descriptor != first.b_descriptor || all[t]->accumulate != first.accumulate ||
          (!a_in_registers && all[t]->a_descriptor != first.a_descriptor)) {
        fail("wgmma: the threads of a warpgroup give different descriptors");
      }
    }
    auto& accumulator = group.accumulators[first.d];
    if (!accumulator) {
      accumulator = std::make_shared<Accumulator>();
      accumulator->columns = columns;
      accumulator->values.resize(64 * columns);
      for (int t = 0; t < WARPGROUP; ++t) {
        accumulator->registers[t] = all[t]->d;
        for (int i = 0; i < columns / 2; ++i) {
          const int row = t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
          accumulator->values[row * columns + column] = all[t]->d[i];
          all[t]->d[i] = bits_as<float>(IN_FLIGHT);
        }
      }
    }
    if (accumulator->columns != columns) fail("wgmma: an accumulator in flight is used with another size");
    ++accumulator->users;
    std::vector<float> registers;
    if (a_in_registers) {
      registers.resize(DEPTH<Format> * 64);
      for (int t = 0; t < WARPGROUP; ++t) {
        for (int i = 0; i < 4; ++i) {
          const int row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8, first = i / 2 * (DEPTH<Format> / 2);
          if (Format::BYTES == 4) {
            registers[(first + t % 4) * 64 + row] = Format::value(all[t]->a[i]);
            continue;
          }
          for (int e = 0; e < 2; ++e) {
            registers[(first + t % 4 * 2 + e) * 64 + row] = Format::value(all[t]->a[i] >> (16 * e) & 0xFFFF);
          }
        }
      }
    }
    const bool accumulate = first.accumulate;
    const uint64_t a_bits = first.a_descriptor, b_bits = first.b_descriptor;
    group.groups.back().push_back([=, to = accumulator] {
      const std::vector<float> a = a_in_registers ? registers : read_operand<Format>(a_bits, 64, a_along);
      const std::vector<float> b = read_operand<Format>(b_bits, columns, b_along);
      for (int row = 0; row < 64; ++row) {
        float sums[256] = {};
        for (int k = 0; k < DEPTH<Format>; ++k) {
          const float factor = a[k * 64 + row];
          for (int n = 0; n < columns; ++n) sums[n] += factor * b[k * columns + n];
        }
        float* d = &to->values[row * columns];
        for (int n = 0; n < columns; ++n) d[n] = accumulate ? d[n] + sums[n] : sums[n];
      }
      --to->users;
    });
  });
}

inline void wgmma_commit() {
  int nothing = 0;
  meet_warpgroup("wgmma.commit_group", nothing,
                 [](int**) { own_block().warpgroups[current->number / WARPGROUP].groups.emplace_back(); });
}

// Finishes all committed groups but the last `pending`; accumulators that nothing works on any more get their values.
inline void wgmma_wait(int pending) {
  meet_warpgroup("wgmma.wait_group", pending, [](int** all) {
    Warpgroup& group = own_block().warpgroups[current->number / WARPGROUP];
    while (int(group.groups.size()) > *all[0] + 1) {
      for (auto& product : group.groups.front()) product();
      group.groups.pop_front();
    }
    for (auto it = group.accumulators.begin(); it != group.accumulators.end();) {
      Accumulator& done = *it->second;
      if (done.users) {
        ++it;
        continue;
      }
      for (int t = 0; t < WARPGROUP; ++t) {
        for (int i = 0; i < done.columns / 2; ++i) {
          const int row = t / 32 * 16 + t % 32 / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
          if (bits_as<unsigned>(done.registers[t][i]) != IN_FLIGHT) {
            fail("wgmma: registers of an accumulator were written before it was waited for");
          }
          done.registers[t][i] = done.values[row * done.columns + column];
        }
      }
      it = group.accumulators.erase(it);
    }
  });
}

}  // namespace emulator
