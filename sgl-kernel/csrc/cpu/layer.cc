// Binding of a whole decoder layer.
#include "dcprt/layer.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "attention_rows.h"
#include "checks.h"

namespace {

using namespace dcprt::binding;
using dcprt::AttentionCall;
using dcprt::AttentionRow;
using dcprt::BFloat16;
using dcprt::FloatType;
using dcprt::LayerArgs;
using tvm::ffi::Optional;
using tvm::ffi::TensorView;

// Everything of the attention but queries and results, which lie in memory of the kernel.
AttentionCall PoolsOf(const TensorView& k, const TensorView& v, int64_t tokens, int64_t heads, double scale) {
  Check(k.ndim() == 4 && v.ndim() == 4 && k.IsContiguous() && v.IsContiguous(), "pools are [pages, size, heads, dim].");
  for (int i = 0; i < 4; ++i) Check(k.size(i) == v.size(i), "keys and values differ in shape.");
  Check(TypeOf(k) == TypeOf(v), "keys and values differ in dtype.");
  Check(k.size(3) % 8 == 0, "dimensions of heads are multiples of 8.");
  AttentionCall call{};
  call.q_type = call.kv_type = TypeOf(k);
  call.k = {Data(k), k.stride(0), k.stride(1), k.stride(2)};
  call.v = {Data(v), v.stride(0), v.stride(1), v.stride(2)};
  call.tokens = tokens;
  call.query_heads = heads;
  call.key_heads = k.size(2);
  call.key_dim = call.value_dim = k.size(3);
  call.causal = true;
  Check(scale > 0, "the scale is not positive.");
  call.scale = static_cast<float>(scale);
  return call;
}

void Layer(TensorView x, Optional<TensorView> add, TensorView norm1, TensorView norm2, double eps, TensorView qkv,
           Optional<TensorView> qkv_bias, TensorView o, TensorView gate_up, Optional<TensorView> gate_up_bias,
           TensorView down, int64_t width, TensorView cos, TensorView sin, TensorView k, TensorView v, TensorView tokens,
           TensorView slots, TensorView key_head_of, TensorView rows, TensorView pages, double scale, TensorView out,
           int64_t threads) {
  const FloatType type = TypeOf(norm1);
  CheckDense(x, 2, FloatType::kFloat32, "x");
  CheckDense(out, 2, FloatType::kFloat32, "out");
  CheckDense(norm1, 1, type, "the first norm");
  CheckDense(norm2, 1, type, "the second norm");
  Check(norm1.size(0) == x.size(1) && norm2.size(0) == x.size(1), "a norm is not as long as a row.");
  Check(out.size(0) == x.size(0) && out.size(1) == x.size(1), "out differs from x in shape.");
  Check(TypeOf(k) == type, "the pools differ from the weights in type.");
  Check(x.size(0) > 0, "a layer needs a token.");
  const int64_t heads = key_head_of.numel();
  LayerArgs a{};
  a.attention = PoolsOf(k, v, x.size(0), heads, scale);
  const int64_t key_heads = a.attention.key_heads, dim = a.attention.key_dim;
  a.qkv = MatrixOf(qkv, (heads + 2 * key_heads) * dim, x.size(1));
  a.o = MatrixOf(o, x.size(1), heads * dim);
  a.gate_up = MatrixOf(gate_up, 2 * width, x.size(1));
  a.down = MatrixOf(down, x.size(1), width);
  for (const auto* m : {&a.qkv, &a.o, &a.gate_up, &a.down}) Check(m->type == type, "the weights differ in type.");
  a.qkv_bias = BiasOf(qkv_bias, a.qkv);
  a.gate_up_bias = BiasOf(gate_up_bias, a.gate_up);
  a.norm1 = Data(norm1);
  a.norm2 = Data(norm2);
  a.eps = static_cast<float>(eps);
  a.x = Data<float>(x);
  a.out = Data<float>(out);
  a.hidden = Size(x, 1);
  a.add = AddOf(add, x);
  Check(TypeOf(cos) == FloatType::kFloat32 && TypeOf(sin) == FloatType::kFloat32, "cos and sin are float32.");
  Check(cos.IsContiguous() && sin.IsContiguous() && cos.numel() == sin.numel(), "cos and sin must be alike.");
  a.half = static_cast<size_t>(cos.numel() / x.size(0));
  Check(static_cast<int64_t>(a.half) * x.size(0) == cos.numel() && 2 * static_cast<int64_t>(a.half) <= dim,
        "cos is not [tokens, <= dim / 2].");
  a.cos = Data<float>(cos);
  a.sin = Data<float>(sin);
  CheckStores(tokens, slots, x.size(0), k);
  a.tokens = Ints(tokens, "tokens");
  a.slots = Ints(slots, "slots");
  a.stored = static_cast<size_t>(tokens.numel());
  const HeadMap map(Ints(key_head_of, "tables"), heads, key_heads);
  map.Describe(&a.attention);
  const std::vector<AttentionRow> found = PagedRows(&a.attention, rows, pages, k);
  a.attention.rows = found.data();
  a.attention.row_count = static_cast<int64_t>(found.size());
  const dcprt::Isa isa = ChosenIsa();
  if (type == FloatType::kFloat32) return dcprt::DecoderLayer<float>(a, isa, static_cast<int>(threads));
  dcprt::DecoderLayer<BFloat16>(a, isa, static_cast<int>(threads));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decoder_layer, Layer);
