// jax_ssd._ffi: the handlers for Python to register, and the plan decoder for tests and tools.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>
#include <string_view>
#include <type_traits>

#include "handler.h"
#include "launcher.h"

namespace nb = nanobind;

namespace {

template <typename Function>
nb::capsule Handler(Function* function) {
  static_assert(std::is_invocable_r_v<XLA_FFI_Error*, Function, XLA_FFI_CallFrame*>,
                "an XLA FFI handler takes an XLA_FFI_CallFrame* and returns an XLA_FFI_Error*");
  return nb::capsule(reinterpret_cast<void*>(function));
}

nb::dict Registrations() {
  nb::dict stages;
  stages["instantiate"] = Handler(jax_ssd::InstantiateHandler);
  stages["initialize"] = Handler(jax_ssd::InitializeHandler);
  stages["execute"] = Handler(jax_ssd::ExecuteHandler);
  nb::dict result;
  result["jax_ssd.launch"] = stages;
  return result;
}

nb::dict Types() {
  nb::dict type;
  type["type_id"] = nb::capsule(jax_ssd::StateTypeId());
  type["type_info"] = nb::capsule(jax_ssd::StateTypeInfo());
  nb::dict result;
  result["jax_ssd.launch_state"] = type;
  return result;
}

std::string DescribePlan(nb::bytes plan, size_t cubin_bytes) {
  jax_ssd::Plan decoded;
  jax_ssd::Status status = jax_ssd::DecodePlan({plan.c_str(), plan.size()}, cubin_bytes, &decoded);
  if (!status.ok()) throw nb::value_error(status.message.c_str());
  return jax_ssd::DescribePlan(decoded);
}

}  // namespace

NB_MODULE(_ffi, module) {
  module.def("registrations", &Registrations, "FFI target name -> stage name -> capsule of the handler.");
  module.def("types", &Types, "FFI type name -> capsules of its id and its description; register these first.");
  module.def("describe_plan", &DescribePlan, nb::arg("plan"), nb::arg("cubin_bytes"),
             "Decode a plan as the handler does and return it as text; ValueError when it is malformed.");
  module.def("live_cubins", [] { return jax_ssd::CubinRegistry::OfProcess().size(); }, "Distinct cubins in use.");
  module.attr("XLA_FFI_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  module.attr("PLAN_VERSION") = jax_ssd::kPlanVersion;
}
