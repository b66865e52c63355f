// The XLA FFI handler `jax_ssd.launch`: one function a stage, and the type of the state that they share.
#pragma once

#include "xla/ffi/api/ffi.h"

namespace jax_ssd {

XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame);

XLA_FFI_TypeId* StateTypeId();
XLA_FFI_TypeInfo* StateTypeInfo();

}  // namespace jax_ssd
