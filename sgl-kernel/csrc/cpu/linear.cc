// Bindings of matrix products, and of the choice of the instruction set.
#include "dcprt/linear.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

namespace {

using dcprt::FloatType;
using dcprt::LinearArgs;
using dcprt::PackedMatrix;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

char* Data(const TensorView& x) { return static_cast<char*>(x.data_ptr()) + x.byte_offset(); }

void Check(bool ok, const char* what) {
  if (!ok) TVM_FFI_THROW(ValueError) << what;
}

FloatType TypeOf(const TensorView& x) {
  const DLDataType type = x.dtype();
  Check(x.device().device_type == kDLCPU, "tensors must be on the CPU.");
  const bool is_float = type.code == kDLFloat && type.bits == 32;
  Check(type.lanes == 1 && (is_float || type.code == kDLBfloat), "products are for float32 and bfloat16.");
  return is_float ? FloatType::kFloat32 : FloatType::kBFloat16;
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

// `data` as a matrix with that many outputs and inputs.
PackedMatrix MatrixOf(const TensorView& data, int64_t outs, int64_t ins) {
  Check(outs >= 0 && ins >= 0, "sizes are not negative.");
  const PackedMatrix m{Data(data), TypeOf(data), static_cast<size_t>(outs), static_cast<size_t>(ins)};
  Check(data.IsContiguous(), "a packed matrix is contiguous.");
  Check(static_cast<size_t>(data.numel()) == m.Panels() * m.PanelElements(), "a packed matrix has another size.");
  return m;
}

void Pack(TensorView weight, TensorView packed) {
  const size_t stride = RowStride(weight);
  Check(TypeOf(weight) == TypeOf(packed), "packing does not change the type.");
  const PackedMatrix m = MatrixOf(packed, weight.size(0), weight.size(1));
  dcprt::PackMatrix(Data(weight), stride, m, Data(packed));
}

void Rows(TensorView packed, int64_t outs, TensorView ids, TensorView out) {
  Check(out.ndim() == 2 && out.IsContiguous() && TypeOf(out) == FloatType::kFloat32, "out is float32 and contiguous.");
  Check(ids.dtype().code == kDLInt && ids.dtype().bits == 64 && ids.IsContiguous(), "ids are int64 and contiguous.");
  Check(ids.numel() == out.size(0), "out has not one row for each id.");
  const PackedMatrix m = MatrixOf(packed, outs, out.size(1));
  dcprt::PackedRows(m, reinterpret_cast<const int64_t*>(Data(ids)), static_cast<size_t>(ids.numel()),
                    reinterpret_cast<float*>(Data(out)));
}

void Linear(TensorView x, TensorView packed, Optional<TensorView> bias, TensorView out, int64_t threads) {
  LinearArgs a{};
  a.x_type = TypeOf(x);
  a.x_stride = RowStride(x);
  a.out_type = TypeOf(out);
  Check(out.ndim() == 2 && out.IsContiguous(), "out must be contiguous.");
  Check(out.size(0) == x.size(0), "out has not as many rows as x.");
  a.matrix = MatrixOf(packed, out.size(1), x.size(1));
  if (bias.has_value()) {
    const TensorView& view = bias.value();
    a.bias_type = TypeOf(view);
    Check(view.ndim() == 1 && view.size(0) == out.size(1), "bias is not [out].");
    Check(view.IsContiguous(), "bias must be contiguous.");
    a.bias = Data(view);
  }
  a.x = Data(x);
  a.out = Data(out);
  a.rows = static_cast<size_t>(x.size(0));
  if (a.rows == 0 || a.matrix.outs == 0) return;
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
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_pack, Pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_rows, Rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_in_use, IsaInUse);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_select, SelectIsa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_possible, PossibleIsas);
