#include "handler.h"

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "launcher.h"

namespace jax_ssd {
namespace {

namespace ffi = xla::ffi;

// plan.cc names data types by their values, without XLA's headers.
static_assert(XLA_FFI_DataType_PRED == 1 && XLA_FFI_DataType_S8 == 2 && XLA_FFI_DataType_S16 == 3 &&
              XLA_FFI_DataType_S32 == 4 && XLA_FFI_DataType_S64 == 5 && XLA_FFI_DataType_U8 == 6 &&
              XLA_FFI_DataType_U16 == 7 && XLA_FFI_DataType_U32 == 8 && XLA_FFI_DataType_U64 == 9 &&
              XLA_FFI_DataType_F16 == 10 && XLA_FFI_DataType_F32 == 11 && XLA_FFI_DataType_F64 == 12 &&
              XLA_FFI_DataType_C64 == 15 && XLA_FFI_DataType_BF16 == 16);

// What XLA keeps for one call site between the stages.
struct State {
  static ffi::TypeId id;
  std::unique_ptr<LoadedPlan> plan;
};
ffi::TypeId State::id = {};

ffi::TypeInfo state_type_info = ffi::MakeTypeInfo<State>();

ffi::Error ToError(Status status) {
  switch (status.code) {
    case Code::kOk:
      return ffi::Error::Success();
    case Code::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::move(status.message));
    case Code::kInternal:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, std::move(status.message));
}

// Runs a stage; an exception (memory ran out) becomes a status, since XLA must not see one.
template <typename Function>
Status Guard(const char* stage, Function&& function) {
  try {
    return std::forward<Function>(function)();
  } catch (const std::exception& exception) {
    return Internal(std::string("jax_ssd.launch, ") + stage + ": " + exception.what());
  }
}

std::string_view Text(ffi::Span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.begin()), bytes.size()};
}

ffi::ErrorOr<std::unique_ptr<State>> Instantiate(ffi::Span<const uint8_t> plan, ffi::Span<const uint8_t> cubins) {
  auto state = std::make_unique<State>();
  Status status = Guard("instantiate", [&] {
    return LoadedPlan::Create(CubinRegistry::OfProcess(), Text(plan), Text(cubins), &state->plan);
  });
  if (!status.ok()) return ffi::Unexpected(ToError(std::move(status)));
  return ffi::ErrorOr<std::unique_ptr<State>>(std::move(state));
}

ffi::Error Initialize(CUstream stream, State* state) {
  return ToError(Guard("initialize", [&] { return state->plan->Initialize(stream); }));
}

BufferView View(const ffi::AnyBuffer& buffer) {
  const auto dims = buffer.dimensions();
  return {buffer.untyped_data(), static_cast<uint32_t>(buffer.element_type()), dims.begin(), dims.size()};
}

Status Execute(CUstream stream, State& state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  static thread_local std::vector<BufferView> operands, results;
  operands.clear();
  results.clear();
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return Internal(buffer.error().message());
    operands.push_back(View(*buffer));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return Internal(buffer.error().message());
    results.push_back(View(**buffer));
  }
  return state.plan->Execute(stream, operands.data(), operands.size(), results.data(), results.size());
}

ffi::Error ExecuteStage(CUstream stream, State* state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  return ToError(Guard("execute", [&] { return Execute(stream, *state, args, rets); }));
}

}  // namespace

XLA_FFI_Error* InstantiateHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::BindInstantiate()
                             .Attr<ffi::Span<const uint8_t>>("plan")    // plan
                             .Attr<ffi::Span<const uint8_t>>("cubins")  // cubins
                             .To(Instantiate)
                             .release();
  return handler->Call(frame);
}

XLA_FFI_Error* InitializeHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                             .Ctx<ffi::PlatformStream<CUstream>>()  // stream
                             .Ctx<ffi::State<State>>()              // state
                             .To(Initialize)
                             .release();
  return handler->Call(frame);
}

// Launches the same kernels whenever it runs, so XLA may capture it into a command buffer.
XLA_FFI_Error* ExecuteHandler(XLA_FFI_CallFrame* frame) {
  static auto* handler = ffi::Ffi::Bind()
                             .Ctx<ffi::PlatformStream<CUstream>>()  // stream
                             .Ctx<ffi::State<State>>()              // state
                             .RemainingArgs()                       // args
                             .RemainingRets()                       // rets
                             .To(ExecuteStage, {ffi::Traits::kCmdBufferCompatible})
                             .release();
  return handler->Call(frame);
}

XLA_FFI_TypeId* StateTypeId() { return &State::id; }
XLA_FFI_TypeInfo* StateTypeInfo() { return &state_type_info; }

}  // namespace jax_ssd
