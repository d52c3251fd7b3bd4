// Bindings of what lies between the matrix products.
#include "dcprt/elementwise.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "checks.h"

namespace {

using namespace dcprt::binding;
using dcprt::BFloat16;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

bool IsFloat32(const TensorView& x) { return x.dtype().code == kDLFloat && x.dtype().bits == 32; }

void CheckType(const TensorView& x) {
  Check(x.device().device_type == kDLCPU, "tensors must be on the CPU.");
  Check(x.dtype().lanes == 1 && (IsFloat32(x) || x.dtype().code == kDLBfloat), "for float32 and bfloat16 only.");
}

void CheckFloat32(const TensorView& x, const char* what) {
  CheckType(x);
  Check(IsFloat32(x), what);
}

// Calls `work` with a null pointer of the element type of x.
template <class Work>
void ByType(const TensorView& x, const Work& work) {
  if (IsFloat32(x)) return work(static_cast<float*>(nullptr));
  work(static_cast<BFloat16*>(nullptr));
}

// y, where given, is added to x first.
void RmsNorm(TensorView x, Optional<TensorView> y, TensorView weight, double eps, TensorView out, int64_t threads) {
  CheckType(x), CheckType(weight), CheckType(out);
  const size_t stride = RowStride(x), rows = Size(x, 0), count = Size(x, 1);
  Check(out.ndim() == 2 && out.size(0) == x.size(0) && out.size(1) == x.size(1), "out differs from x in shape.");
  Check(out.IsContiguous() && weight.IsContiguous(), "out and weight must be contiguous.");
  Check(weight.ndim() == 1 && weight.size(0) == x.size(1), "weight is not as long as a row.");
  if (rows == 0 || count == 0) return;
  const auto tiny = static_cast<float>(eps);
  const int n = static_cast<int>(threads);
  const dcprt::Isa isa = ChosenIsa();
  if (y.has_value()) {
    CheckFloat32(x, "sums are float32.");
    CheckFloat32(y.value(), "sums are float32.");
    Check(y.value().numel() == x.numel() && y.value().IsContiguous() && x.IsContiguous(), "x and y must be alike.");
  }
  ByType(weight, [&](auto* w) {
    ByType(out, [&](auto* o) {
      using W = std::remove_pointer_t<decltype(w)>;
      using O = std::remove_pointer_t<decltype(o)>;
      if (y.has_value()) {
        return dcprt::AddRmsNorm(Data<float>(x), Data<float>(y.value()), Data<W>(weight), tiny, Data<O>(out), rows,
                                 count, isa, n);
      }
      ByType(x, [&](auto* in) {
        using X = std::remove_pointer_t<decltype(in)>;
        dcprt::RmsNorm(Data<X>(x), stride, Data<W>(weight), tiny, Data<O>(out), rows, count, isa, n);
      });
    });
  });
}

void SiluMul(TensorView x, TensorView out, int64_t threads) {
  CheckType(x), CheckType(out);
  const size_t stride = RowStride(x);
  Check(out.ndim() == 2 && out.size(0) == x.size(0) && 2 * out.size(1) == x.size(1), "out is not half as wide as x.");
  Check(out.IsContiguous() && IsFloat32(out) == IsFloat32(x), "out must be contiguous and of the type of x.");
  if (out.numel() == 0) return;
  ByType(x, [&](auto* in) {
    using X = std::remove_pointer_t<decltype(in)>;
    dcprt::SiluMul(Data<X>(x), stride, Data<X>(out), Size(out, 0), Size(out, 1), ChosenIsa(), static_cast<int>(threads));
  });
}

void Rotate(TensorView x, TensorView cos, TensorView sin, int64_t threads) {
  CheckType(x);
  CheckFloat32(cos, "cos and sin are float32.");
  CheckFloat32(sin, "cos and sin are float32.");
  Check(x.ndim() == 3 && (x.size(2) < 2 || x.stride(2) == 1), "x is [tokens, heads, dim] with dense heads.");
  Check(cos.IsContiguous() && sin.IsContiguous() && cos.numel() == sin.numel(), "cos and sin must be alike.");
  if (x.numel() == 0) return;
  const size_t tokens = Size(x, 0), half = static_cast<size_t>(cos.numel()) / tokens;
  Check(static_cast<size_t>(cos.numel()) == half * tokens && 2 * half <= Size(x, 2), "cos is not [tokens, <= dim / 2].");
  ByType(x, [&](auto* in) {
    using X = std::remove_pointer_t<decltype(in)>;
    dcprt::Rotate(Data<X>(x), static_cast<size_t>(x.stride(0)), static_cast<size_t>(x.stride(1)), Data<float>(cos),
                  Data<float>(sin), tokens, Size(x, 1), half, ChosenIsa(), static_cast<int>(threads));
  });
}

void ArgMax(TensorView x, TensorView places, TensorView values, int64_t threads) {
  CheckFloat32(x, "x is float32.");
  CheckFloat32(values, "values are float32.");
  const size_t stride = RowStride(x), rows = Size(x, 0);
  Check(places.dtype().code == kDLInt && places.dtype().bits == 64, "places are int64.");
  Check(places.IsContiguous() && values.IsContiguous(), "places and values must be contiguous.");
  Check(places.numel() == x.size(0) && values.numel() == x.size(0), "one place and one value for each row.");
  if (rows == 0) return;
  Check(x.size(1) > 0, "a row without elements has no greatest.");
  dcprt::ArgMax(Data<float>(x), stride, Data<int64_t>(places), Data<float>(values), rows, Size(x, 1), ChosenIsa(),
                static_cast<int>(threads));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(rms_norm, RmsNorm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(silu_mul, SiluMul);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rotate, Rotate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(argmax, ArgMax);
