// The result of everything that can fail below the FFI shell: a code and words. Nothing here throws on purpose.
#pragma once

#include <string>
#include <utility>

namespace jax_ssd {

enum class Code { kOk, kInvalidArgument, kInternal };

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
};

inline Status InvalidArgument(std::string message) { return {Code::kInvalidArgument, std::move(message)}; }
inline Status Internal(std::string message) { return {Code::kInternal, std::move(message)}; }

}  // namespace jax_ssd
