// Stands for the second half of kernels/cuda/wgmma.cuh, which makes PTX by macros.
template <typename T>
struct EmulatedFormat;
template <>
struct EmulatedFormat<__nv_bfloat16> : emulator::Bfloat16 {};
template <>
struct EmulatedFormat<__half> : emulator::Half {};

template <typename T, int N>
struct Wgmma {
  template <bool ColumnsA = false, bool ColumnsB = false>
  static void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {
    emulator::wgmma<EmulatedFormat<T>>(N, false, !ColumnsA, !ColumnsB, {d, {}, a, b, accumulate});
  }
  template <bool ColumnsB = false>
  static void registers(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
    emulator::wgmma<EmulatedFormat<T>>(N, true, false, !ColumnsB, {d, {a[0], a[1], a[2], a[3]}, 0, b, accumulate});
  }
};

}  // namespace jax_ssd
