// Bindings of the products behind a norm.
#include "dcprt/fused.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "checks.h"

namespace {

using namespace dcprt::binding;
using dcprt::BFloat16;
using dcprt::FloatType;
using dcprt::NormArgs;
using dcprt::PackedMatrix;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

template <class T>
NormArgs<T> NormOf(const TensorView& x, const Optional<TensorView>& add, const TensorView& weight, double eps) {
  CheckDense(x, 2, FloatType::kFloat32, "x");
  CheckDense(weight, 1, TypeOf(weight), "the norm's weight");
  Check(weight.size(0) == x.size(1), "the norm's weight is not as long as a row.");
  return {Data<float>(x), AddOf(add, x), Data<T>(weight), static_cast<float>(eps), Size(x, 0), Size(x, 1)};
}

// Calls `work` with a null pointer of the type of the weights.
template <class Work>
void ByWeights(const TensorView& norm, const Work& work) {
  if (TypeOf(norm) == FloatType::kFloat32) return work(static_cast<float*>(nullptr));
  work(static_cast<BFloat16*>(nullptr));
}

void NormLinear(TensorView x, Optional<TensorView> add, TensorView norm, double eps, TensorView packed,
                Optional<TensorView> bias, TensorView out, int64_t threads) {
  ByWeights(norm, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const NormArgs<T> a = NormOf<T>(x, add, norm, eps);
    CheckDense(out, 2, TypeOf(norm), "out");
    Check(out.size(0) == x.size(0), "out has not as many rows as x.");
    const PackedMatrix m = MatrixOf(packed, out.size(1), x.size(1));
    Check(TypeOf(norm) == m.type, "the norm and the matrix differ in type.");
    const T* b = static_cast<const T*>(BiasOf(bias, m));
    dcprt::NormLinear(a, m, b, Data<T>(out), ChosenIsa(), static_cast<int>(threads));
  });
}

void NormGatedMlp(TensorView x, Optional<TensorView> add, TensorView norm, double eps, TensorView gate_up,
                  Optional<TensorView> bias, TensorView down, int64_t width, TensorView out, int64_t threads) {
  ByWeights(norm, [&](auto* of) {
    using T = std::remove_pointer_t<decltype(of)>;
    const NormArgs<T> a = NormOf<T>(x, add, norm, eps);
    CheckDense(out, 2, FloatType::kFloat32, "out");
    Check(out.size(0) == x.size(0), "out has not as many rows as x.");
    const PackedMatrix first = MatrixOf(gate_up, 2 * width, x.size(1)), second = MatrixOf(down, out.size(1), width);
    Check(TypeOf(norm) == first.type, "the norm and the matrix differ in type.");
    Check(first.type == second.type, "the matrices differ in type.");
    const T* b = static_cast<const T*>(BiasOf(bias, first));
    dcprt::NormGatedMlp(a, first, b, second, Data<float>(out), ChosenIsa(), static_cast<int>(threads));
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_linear, NormLinear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(norm_gated_mlp, NormGatedMlp);
