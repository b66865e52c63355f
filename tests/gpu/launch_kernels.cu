// Kernels that use each kind of argument and each option of a launch once; test_launch.py knows what they compute.

// y[i] = x[i] * factor + i, by a grid that spreads over all three axes.
template <int Threads>
__global__ void scale(const float* x, float* y, float factor, long long size) {
  const long long block = blockIdx.x + gridDim.x * (blockIdx.y + (long long)gridDim.y * blockIdx.z);
  const long long i = block * Threads + threadIdx.x;
  if (i < size) y[i] = x[i] * factor + float(i);
}

// sums[block] = sum of the block's part of x, through more shared memory than a kernel gets unasked.
template <int Threads>
__global__ void block_sums(const float* x, float* sums, int per_block) {
  extern __shared__ float staged[];
  for (int i = threadIdx.x; i < per_block; i += Threads) staged[i] = x[blockIdx.x * per_block + i];
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0;
    for (int i = 0; i < per_block; ++i) sum += staged[i];
    sums[blockIdx.x] = sum;
  }
}

// state += sum of sums, in place. Waits for the kernel ahead of it, which may still be running when this one begins.
__global__ void accumulate(const float* sums, float* state, int count) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += sums[i];
  state[0] += sum;
}

// rank[block] = the block's rank in its cluster.
__global__ void cluster_ranks(int* rank) {
  int value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(value));
  rank[blockIdx.x] = value;
}

struct alignas(64) TensorMap {
  char bytes[128];
};

// y = the 8 x 32 tile of x at row 8, column 32, fetched by TMA.
__global__ void copy_tile(const __grid_constant__ TensorMap map, float* y) {
  __shared__ alignas(128) float tile[8 * 32];
  __shared__ unsigned long long barrier;
  const unsigned barrier_address = static_cast<unsigned>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_address));
    asm volatile("fence.mbarrier_init.release.cluster;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(barrier_address) : "memory");
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            static_cast<unsigned>(__cvta_generic_to_shared(tile))),
        "l"(&map), "r"(32), "r"(8), "r"(barrier_address)
        : "memory");
  }
  __syncthreads();
  unsigned done = 0;
  while (done == 0) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier_address)
                 : "memory");
  }
  y[threadIdx.x] = tile[threadIdx.x];
}
