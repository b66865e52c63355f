// The few types and functions of the CUDA driver that launching needs, declared here so that building takes no CUDA
// toolkit. Names, layouts and values are those of cuda.h (12.0 and later). The functions are reached through a table:
// the real one is filled from libcuda.so.1 at run time, tests bring their own.
#pragma once

#include <cstdint>

#include "status.h"

extern "C" {
typedef int CUresult;  // an enum in cuda.h; 0 is success
typedef int CUdevice;
typedef struct CUctx_st* CUcontext;
typedef struct CUfunc_st* CUfunction;
typedef struct CUkern_st* CUkernel;
typedef struct CUlib_st* CUlibrary;
typedef struct CUstream_st* CUstream;

// CUlaunchAttribute: an id padded to 8 bytes, then a union of 64 bytes.
struct CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char pad[64];
    struct {
      unsigned int x, y, z;
    } clusterDim;
    int programmaticStreamSerializationAllowed;
  } value;
};

struct CUlaunchConfig {
  unsigned int gridDimX, gridDimY, gridDimZ;
  unsigned int blockDimX, blockDimY, blockDimZ;
  unsigned int sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned int numAttrs;
};

struct alignas(64) CUtensorMap {
  uint64_t opaque[16];
};
}

static_assert(sizeof(CUlaunchAttribute) == 72);
static_assert(sizeof(CUlaunchConfig) == 56);
static_assert(sizeof(CUtensorMap) == 128);

namespace jax_ssd {

constexpr int kLaunchAttributeClusterDimension = 4;
constexpr int kLaunchAttributeProgrammaticStreamSerialization = 6;
constexpr int kFuncAttributeMaxDynamicSharedSizeBytes = 8;

struct Driver {
  CUresult (*cuInit)(unsigned int flags);
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** words);
  CUresult (*cuStreamGetCtx)(CUstream stream, CUcontext* context);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuCtxGetDevice)(CUdevice* device);
  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, void* jit_options, void** jit_values,
                                unsigned int num_jit, void* options, void** values, unsigned int num_options);
  CUresult (*cuLibraryUnload)(CUlibrary library);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelGetFunction)(CUfunction* function, CUkernel kernel);
  CUresult (*cuKernelSetAttribute)(int attribute, int value, CUkernel kernel, CUdevice device);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** params, void** extra);
  CUresult (*cuTensorMapEncodeTiled)(CUtensorMap* map, int data_type, uint32_t rank, void* address,
                                     const uint64_t* dims, const uint64_t* strides, const uint32_t* box,
                                     const uint32_t* element_strides, int interleave, int swizzle, int l2_promotion,
                                     int oob_fill);
};

// The driver of this process, opened on the first call. The pointer stays valid for the life of the process.
Status OpenDriver(const Driver** driver);

// `result` as a status: "<what>: CUDA_ERROR_NAME (words)".
Status CudaStatus(const Driver& driver, CUresult result, const std::string& what);

}  // namespace jax_ssd
