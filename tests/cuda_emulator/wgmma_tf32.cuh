// Stands for the second half of kernels/cuda/wgmma_tf32.cuh, which makes PTX by macros.
template <int N>
struct WgmmaTf32 {
  static void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {
    emulator::wgmma<emulator::Tf32>(N, false, true, true, {d, {}, a, b, accumulate});
  }
  static void registers(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
    emulator::wgmma<emulator::Tf32>(N, true, true, true, {d, {a[0], a[1], a[2], a[3]}, 0, b, accumulate});
  }
};

}  // namespace jax_ssd
