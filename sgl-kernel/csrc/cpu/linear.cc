// Bindings of matrix products, and of the choice of the instruction set.
#include "dcprt/linear.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include "checks.h"

namespace {

using namespace dcprt::binding;
using dcprt::BFloat16;
using dcprt::FloatType;
using dcprt::LinearArgs;
using dcprt::PackedMatrix;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

void Pack(TensorView weight, TensorView packed) {
  const size_t stride = RowStride(weight);
  Check(TypeOf(weight) == TypeOf(packed), "packing does not change the type.");
  const PackedMatrix m = MatrixOf(packed, weight.size(0), weight.size(1));
  dcprt::PackMatrix(Data(weight), stride, m, Data(packed));
}

int64_t Code(TensorView weight, TensorView coded, int64_t threads) {
  const size_t stride = RowStride(weight);
  Check(TypeOf(weight) == FloatType::kBFloat16, "only bfloat16 is coded.");
  Check(IsCoded(coded) && coded.IsContiguous(), "a coded matrix is uint8 and contiguous.");
  Check(reinterpret_cast<uintptr_t>(Data(coded)) % 8 == 0, "a coded matrix is aligned to 8 bytes.");
  const PackedMatrix m{nullptr, FloatType::kBFloat16, Size(weight, 0), Size(weight, 1), true};
  Check(coded.numel() >= static_cast<int64_t>(dcprt::CodedRoom(m)), "coding needs more room.");
  Check(threads > 0, "there is no thread.");
  return static_cast<int64_t>(
      dcprt::CodeMatrix(Data<const BFloat16>(weight), stride, m, Data(coded), static_cast<int>(threads)));
}

void Rows(TensorView packed, int64_t outs, TensorView ids, TensorView out) {
  Check(out.ndim() == 2 && out.IsContiguous() && TypeOf(out) == FloatType::kFloat32, "out is float32 and contiguous.");
  Check(ids.numel() == out.size(0), "out has not one row for each id.");
  const PackedMatrix m = MatrixOf(packed, outs, out.size(1));
  dcprt::PackedRows(m, Ints(ids, "ids"), static_cast<size_t>(ids.numel()), Data<float>(out));
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
  a.out_stride = a.matrix.outs;
  if (a.rows == 0 || a.matrix.outs == 0) return;
  dcprt::Linear(a, ChosenIsa(), static_cast<int>(threads));
}

// Elements from one place of a dimension to the next.
size_t StepOf(const TensorView& x, int dim) { return static_cast<size_t>(x.size(dim) < 2 ? 0 : x.stride(dim)); }

void Heads(TensorView x, TensorView packed, TensorView out, int64_t threads) {
  Check(x.ndim() == 3 && out.ndim() == 3, "x and out are [rows, heads, count].");
  Check(x.size(0) == out.size(0) && x.size(1) == out.size(1), "x and out differ in rows or heads.");
  for (const TensorView* one : {&x, &out}) Check(one->size(2) < 2 || one->stride(2) == 1, "elements must be dense.");
  Check(packed.IsContiguous(), "packed matrices are contiguous.");
  LinearArgs a{};
  a.matrix = {Data(packed), TypeOf(packed), Size(out, 2), Size(x, 2)};
  const size_t heads = Size(x, 1), elements = a.matrix.Panels() * a.matrix.PanelElements();
  Check(static_cast<size_t>(packed.numel()) == heads * elements, "there is not one packed matrix for each head.");
  a.x = Data(x);
  a.x_type = TypeOf(x);
  a.x_stride = StepOf(x, 0);
  a.out = Data(out);
  a.out_type = TypeOf(out);
  a.out_stride = StepOf(out, 0);
  a.rows = Size(x, 0);
  if (a.rows == 0 || heads == 0 || a.matrix.outs == 0) return;
  dcprt::LinearHeads(a, heads, StepOf(x, 1), StepOf(out, 1), ChosenIsa(), static_cast<int>(threads));
}

tvm::ffi::String IsaInUse() { return dcprt::NameOf(ChosenIsa()); }

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
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_heads, Heads);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_pack, Pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_code, Code);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(linear_rows, Rows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_in_use, IsaInUse);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_select, SelectIsa);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(isa_possible, PossibleIsas);
