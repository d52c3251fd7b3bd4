// Bindings of matrix products with few rows, and of the choice of the instruction set.
#include "dcprt/linear.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

namespace {

using dcprt::LinearArgs;
using dcprt::LinearType;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

char* Data(const TensorView& x) { return static_cast<char*>(x.data_ptr()) + x.byte_offset(); }

void Check(bool ok, const char* what) {
  if (!ok) TVM_FFI_THROW(ValueError) << what;
}

LinearType TypeOf(const TensorView& x) {
  const DLDataType type = x.dtype();
  Check(x.device().device_type == kDLCPU, "tensors must be on the CPU.");
  const bool is_float = type.code == kDLFloat && type.bits == 32;
  Check(type.lanes == 1 && (is_float || type.code == kDLBfloat), "products are for float32 and bfloat16.");
  return is_float ? LinearType::kFloat32 : LinearType::kBFloat16;
}

// Elements from one row to the next; within a row they are dense.
size_t RowStride(const TensorView& x) {
  Check(x.ndim() == 2, "x, weight and out have two dimensions.");
  Check(x.size(1) < 2 || x.stride(1) == 1, "the elements of a row must be dense.");
  return static_cast<size_t>(x.size(0) < 2 ? x.size(1) : x.stride(0));
}

dcprt::Isa Chosen() {
  try {
    return dcprt::CurrentIsa();
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
  __builtin_unreachable();
}

void Linear(TensorView x, TensorView weight, Optional<TensorView> bias, TensorView out, int64_t threads) {
  LinearArgs a{};
  a.x_type = TypeOf(x);
  a.weight_type = TypeOf(weight);
  a.out_type = TypeOf(out);
  a.x_stride = RowStride(x);
  a.weight_stride = RowStride(weight);
  Check(out.ndim() == 2 && out.IsContiguous(), "out must be contiguous.");
  Check(x.size(1) == weight.size(1), "x and weight differ in their inner size.");
  Check(out.size(0) == x.size(0) && out.size(1) == weight.size(0), "out is not [rows of x, rows of weight].");
  if (bias.has_value()) {
    const TensorView& view = bias.value();
    a.bias_type = TypeOf(view);
    Check(view.ndim() == 1 && view.size(0) == weight.size(0), "bias is not [rows of weight].");
    Check(view.IsContiguous(), "bias must be contiguous.");
    a.bias = Data(view);
  }
  a.x = Data(x);
  a.weight = Data(weight);
  a.out = Data(out);
  a.rows = static_cast<size_t>(x.size(0));
  a.ins = static_cast<size_t>(x.size(1));
  a.outs = static_cast<size_t>(weight.size(0));
  if (a.rows == 0 || a.outs == 0) return;
  dcprt::Linear(a, Chosen(), static_cast<int>(threads));
}

tvm::ffi::String IsaInUse() { return dcprt::NameOf(Chosen()); }

void SelectIsa(tvm::ffi::String name) {
  try {
    dcprt::SelectIsa(dcprt::IsaNamed(name));
  } catch (const std::invalid_argument& error) {
    TVM_FFI_THROW(ValueError) << error.what();
  }
}

tvm::ffi::String PossibleIsas() {
  std::string names;
  for (const std::string& name : dcprt::PossibleIsas()) names += (names.empty() ? "" : " ") + name;
  return names;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear, Linear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_in_use, IsaInUse);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_select, SelectIsa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_possible, PossibleIsas);
