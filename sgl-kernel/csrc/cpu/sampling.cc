// Binding of drawing a token from logits.
#include "dcprt/sampling.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cmath>

#include "checks.h"

namespace {

using namespace dcprt::binding;
using dcprt::FloatType;
using tvm::ffi::TensorView;

int64_t Draw(TensorView logits, double temperature, int64_t top_k, double top_p, double min_p, double drawn) {
  CheckDense(logits, 1, FloatType::kFloat32, "logits");
  Check(logits.size(0) > 0, "there are no logits.");
  Check(temperature > 0 && std::isfinite(temperature), "the temperature is not positive and finite.");
  Check(top_p >= 0 && top_p <= 1 && min_p >= 0 && min_p <= 1, "top_p and min_p lie in [0, 1].");
  Check(drawn >= 0 && drawn < 1, "what is drawn lies in [0, 1).");
  const int64_t token =
      dcprt::Draw(Data<float>(logits), Size(logits, 0), {temperature, top_k, top_p, min_p}, drawn, ChosenIsa());
  Check(token >= 0, "the greatest logit is not finite.");
  return token;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sampling_draw, Draw);
