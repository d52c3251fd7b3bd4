// Bindings of merging and packing partial attention results.
#include "dcprt/merge.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "checks.h"

namespace {

using namespace dcprt::binding;
using dcprt::FloatType;
using dcprt::PartialView;
using tvm::ffi::TensorView;

void CheckPartial(const TensorView& out, const TensorView& lse) {
  CheckDense(out, 3, FloatType::kFloat32, "out");
  CheckDense(lse, 2, FloatType::kFloat32, "lse");
  Check(out.size(0) == lse.size(0) && out.size(1) == lse.size(1), "out and lse differ in shape.");
}

void Merge(TensorView out_a, TensorView lse_a, TensorView out_b, TensorView lse_b, TensorView out, TensorView lse,
           int64_t threads) {
  CheckPartial(out_a, lse_a), CheckPartial(out_b, lse_b), CheckPartial(out, lse);
  for (int i = 0; i < 3; ++i) {
    Check(out_a.size(i) == out.size(i) && out_b.size(i) == out.size(i), "the parts differ in shape.");
  }
  const size_t dim = Size(out, 2);
  const PartialView parts[] = {{Data<float>(out_a), dim, Data<float>(lse_a), 1},
                               {Data<float>(out_b), dim, Data<float>(lse_b), 1}};
  dcprt::MergePartials(parts, 2, static_cast<size_t>(lse.numel()), dim, Data<float>(out), Data<float>(lse), ChosenIsa(),
                       static_cast<int>(threads));
}

// packed: [parts, tokens, heads, dim + 1]
void MergePacked(TensorView packed, TensorView out, TensorView lse, int64_t threads) {
  CheckPartial(out, lse);
  CheckDense(packed, 4, FloatType::kFloat32, "packed");
  Check(packed.size(1) == out.size(0) && packed.size(2) == out.size(1) && packed.size(3) == out.size(2) + 1,
        "packed is not [parts, tokens, heads, dim + 1].");
  Check(Size(packed, 0) <= dcprt::kMostParts, "there are too many parts.");
  dcprt::MergePacked(Data<float>(packed), Size(packed, 0), static_cast<size_t>(lse.numel()), Size(out, 2), Data<float>(out),
                     Data<float>(lse), ChosenIsa(), static_cast<int>(threads));
}

// packed: [ranks, tokens, heads / ranks, dim + 1]
void Pack(TensorView out, TensorView lse, TensorView packed) {
  CheckPartial(out, lse);
  CheckDense(packed, 4, FloatType::kFloat32, "packed");
  Check(packed.size(1) == out.size(0) && packed.size(0) * packed.size(2) == out.size(1) &&
            packed.size(3) == out.size(2) + 1,
        "packed is not [ranks, tokens, heads / ranks, dim + 1].");
  dcprt::PackPartial(Data<float>(out), Data<float>(lse), Size(out, 0), Size(packed, 0), Size(packed, 2), Size(out, 2),
                     Data<float>(packed));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge, Merge);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_packed, MergePacked);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(merge_pack, Pack);
