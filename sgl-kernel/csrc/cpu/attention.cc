// Bindings of attention: checks, page tables, and the key heads of the query heads.
#include "dcprt/attention.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstddef>
#include <vector>

#include "attention_rows.h"
#include "checks.h"

namespace {

using namespace dcprt::binding;
using dcprt::AttentionCall;
using dcprt::AttentionRow;
using dcprt::AttentionSource;
using dcprt::FloatType;
using tvm::ffi::TensorView;

void CheckHeads(const TensorView& x, int ndim) {
  Check(x.ndim() == ndim, "queries have 3 dimensions, pools 4, keys and values 3.");
  Check(x.size(ndim - 1) < 2 || x.stride(ndim - 1) == 1, "the elements of a head must be dense.");
}

void CheckResults(const TensorView& out, const TensorView& lse, const AttentionCall& call) {
  Check(TypeOf(out) == FloatType::kFloat32 && TypeOf(lse) == FloatType::kFloat32, "results are float32.");
  Check(out.ndim() == 3 && out.IsContiguous() && lse.ndim() == 2 && lse.IsContiguous(), "results must be dense.");
  Check(out.size(0) == call.tokens && out.size(1) == call.query_heads && out.size(2) == call.value_dim,
        "out is not [tokens, heads, value dim].");
  Check(lse.size(0) == call.tokens && lse.size(1) == call.query_heads, "lse is not [tokens, heads].");
}

// Everything but rows, pages and heads. `lead`: dimensions before the heads of keys and values.
AttentionCall CallOf(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
                     const TensorView& lse, double scale, int lead) {
  AttentionCall call{};
  CheckHeads(q, 3);
  CheckHeads(k, lead + 2);
  CheckHeads(v, lead + 2);
  call.q_type = TypeOf(q);
  call.kv_type = TypeOf(k);
  Check(TypeOf(v) == call.kv_type, "keys and values differ in dtype.");
  for (int i = 0; i <= lead; ++i) Check(k.size(i) == v.size(i), "keys and values differ in shape.");
  call.q = Data(q);
  call.q_token_step = q.stride(0);
  call.q_head_step = q.stride(1);
  const auto source = [lead](const TensorView& x) {
    return AttentionSource{Data(x), lead == 2 ? x.stride(0) : 0, x.stride(lead - 1), x.stride(lead)};
  };
  call.k = source(k);
  call.v = source(v);
  call.tokens = q.size(0);
  call.query_heads = q.size(1);
  call.key_heads = k.size(lead);
  call.key_dim = q.size(2);
  call.value_dim = v.size(lead + 1);
  Check(k.size(lead + 1) == call.key_dim, "queries and keys differ in their inner size.");
  Check(call.key_dim % 8 == 0 && call.value_dim % 8 == 0, "dimensions of heads are multiples of 8.");
  CheckResults(out, lse, call);
  call.out = reinterpret_cast<float*>(Data(out));
  call.lse = reinterpret_cast<float*>(Data(lse));
  Check(scale > 0, "the scale is not positive.");
  call.scale = static_cast<float>(scale);
  return call;
}

void Run(AttentionCall& call, const TensorView& key_head_of, const std::vector<AttentionRow>& rows, int64_t threads) {
  Check(key_head_of.numel() == call.query_heads, "the map of heads is not [heads].");
  const HeadMap heads(Ints(key_head_of, "tables"), call.query_heads, call.key_heads);
  heads.Describe(&call);
  call.rows = rows.data();
  call.row_count = static_cast<int64_t>(rows.size());
  dcprt::Attention(call, ChosenIsa(), threads);
}

// rows: [rows, 4], each start, stop, keys and the place of its first page in `pages`.
void Context(TensorView q, TensorView k, TensorView v, TensorView key_head_of, TensorView rows, TensorView pages,
             double scale, int64_t threads, TensorView out, TensorView lse) {
  AttentionCall call = CallOf(q, k, v, out, lse, scale, 2);
  const std::vector<AttentionRow> found = PagedRows(&call, rows, pages, k);
  Run(call, key_head_of, found, threads);
}

// Causal, over the context and the row's own tokens, which are in the pages too. rows as above, with the length of the
// context in place of the number of keys.
void Paged(TensorView q, TensorView k, TensorView v, TensorView key_head_of, TensorView rows, TensorView pages,
           double scale, int64_t threads, TensorView out, TensorView lse) {
  AttentionCall call = CallOf(q, k, v, out, lse, scale, 2);
  call.causal = true;
  const std::vector<AttentionRow> found = PagedRows(&call, rows, pages, k);
  Run(call, key_head_of, found, threads);
}

// rows as above; only start and stop count.
void NewTokens(TensorView q, TensorView k, TensorView v, TensorView key_head_of, TensorView rows, double scale,
               int64_t threads, TensorView out, TensorView lse) {
  AttentionCall call = CallOf(q, k, v, out, lse, scale, 1);
  const int64_t* table = Ints(rows, "tables");
  Check(rows.ndim() == 2 && rows.size(1) == 4, "rows are [rows, 4].");
  Check(k.size(0) == call.tokens, "there are not as many keys as tokens.");
  call.causal = true;
  std::vector<AttentionRow> found;
  found.reserve(static_cast<size_t>(rows.size(0)));
  for (int64_t r = 0; r < rows.size(0); ++r, table += 4) {
    const AttentionRow row{table[0], table[1], table[1] - table[0], 0, table[0]};
    CheckTokens(row, call);
    found.push_back(row);
  }
  Run(call, key_head_of, found, threads);
}

void Dense(TensorView q, TensorView k, TensorView v, TensorView key_head_of, double scale, int64_t threads,
           TensorView out, TensorView lse) {
  AttentionCall call = CallOf(q, k, v, out, lse, scale, 1);
  Run(call, key_head_of, {AttentionRow{0, call.tokens, k.size(0), 0, 0}}, threads);
}

void Exp(TensorView x, TensorView out) {
  Check(TypeOf(x) == FloatType::kFloat32 && TypeOf(out) == FloatType::kFloat32, "exp is for float32.");
  Check(x.IsContiguous() && out.IsContiguous() && x.numel() == out.numel(), "exp needs dense tensors of one size.");
  dcprt::attention_detail::OpsOf(ChosenIsa())
      .exp(reinterpret_cast<const float*>(Data(x)), reinterpret_cast<float*>(Data(out)), x.numel());
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_context, Context);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_paged, Paged);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_new_tokens, NewTokens);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_dense, Dense);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(attention_exp, Exp);
