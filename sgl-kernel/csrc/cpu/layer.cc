// Binding of whole decoder layers.
#include "dcprt/layer.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "attention_rows.h"
#include "checks.h"

namespace {

using namespace dcprt::binding;
using dcprt::AttentionCall;
using dcprt::AttentionRow;
using dcprt::BFloat16;
using dcprt::FloatType;
using dcprt::LayerArgs;
using tvm::ffi::Array;
using tvm::ffi::Tensor;
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

// Of one layer, in the order of the Python wrapper.
enum Weight { kNorm1, kNorm2, kQkv, kQkvBias, kO, kGateUp, kGateUpBias, kDown, kWeights };

const void* BiasIn(const TensorView& bias, const dcprt::PackedMatrix& matrix) {
  return bias.numel() == 0 ? nullptr : BiasOf(bias, matrix);
}

// Norms and matrices of layer `i`; what they are multiplied with is in `a` already.
void SetWeights(const Array<Tensor>& weights, int64_t i, int64_t width, LayerArgs* a) {
  const auto of = [&](Weight weight) { return TensorView(weights[i * kWeights + weight]); };
  const int64_t hidden = static_cast<int64_t>(a->hidden), heads = a->attention.query_heads;
  const int64_t dim = a->attention.key_dim, key_heads = a->attention.key_heads;
  const FloatType type = a->attention.kv_type;
  for (const Weight norm : {kNorm1, kNorm2}) {
    CheckDense(of(norm), 1, type, "a norm");
    Check(of(norm).size(0) == hidden, "a norm is not as long as a row.");
  }
  a->norm1 = Data(of(kNorm1));
  a->norm2 = Data(of(kNorm2));
  a->qkv = MatrixOf(of(kQkv), (heads + 2 * key_heads) * dim, hidden);
  a->o = MatrixOf(of(kO), hidden, heads * dim);
  a->gate_up = MatrixOf(of(kGateUp), 2 * width, hidden);
  a->down = MatrixOf(of(kDown), hidden, width);
  for (const auto* m : {&a->qkv, &a->o, &a->gate_up, &a->down}) Check(m->type == type, "the weights differ in type.");
  a->qkv_bias = BiasIn(of(kQkvBias), a->qkv);
  a->gate_up_bias = BiasIn(of(kGateUpBias), a->gate_up);
}

// What all layers have in common.
void SetStep(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& k,
             const TensorView& tokens, const TensorView& slots, const TensorView& out, LayerArgs* a) {
  CheckDense(x, 2, FloatType::kFloat32, "x");
  CheckDense(out, 2, FloatType::kFloat32, "out");
  Check(out.size(0) == x.size(0) && out.size(1) == x.size(1), "out differs from x in shape.");
  Check(x.size(0) > 0, "a layer needs a token.");
  a->x = Data<float>(x);
  a->out = Data<float>(out);
  a->hidden = Size(x, 1);
  Check(TypeOf(cos) == FloatType::kFloat32 && TypeOf(sin) == FloatType::kFloat32, "cos and sin are float32.");
  Check(cos.IsContiguous() && sin.IsContiguous() && cos.numel() == sin.numel(), "cos and sin must be alike.");
  a->half = static_cast<size_t>(cos.numel() / x.size(0));
  Check(static_cast<int64_t>(a->half) * x.size(0) == cos.numel() && 2 * static_cast<int64_t>(a->half) <= k.size(3),
        "cos is not [tokens, <= dim / 2].");
  a->cos = Data<float>(cos);
  a->sin = Data<float>(sin);
  CheckStores(tokens, slots, x.size(0), k);
  a->tokens = Ints(tokens, "tokens");
  a->slots = Ints(slots, "slots");
  a->stored = static_cast<size_t>(tokens.numel());
}

void Layers(TensorView x, Array<Tensor> weights, double eps, int64_t width, TensorView cos, TensorView sin,
            Array<Tensor> pools, TensorView tokens, TensorView slots, TensorView key_head_of, TensorView rows,
            TensorView pages, double scale, TensorView out, int64_t threads) {
  const int64_t layers = static_cast<int64_t>(weights.size()) / kWeights;
  Check(layers > 0 && layers * kWeights == static_cast<int64_t>(weights.size()), "weights are those of whole layers.");
  Check(static_cast<int64_t>(pools.size()) == 2 * layers, "there are two pools for each layer.");
  const TensorView first = pools[0];
  LayerArgs a{};
  a.eps = static_cast<float>(eps);
  a.attention = PoolsOf(first, pools[1], x.size(0), key_head_of.numel(), scale);
  SetStep(x, cos, sin, first, tokens, slots, out, &a);
  const HeadMap map(Ints(key_head_of, "tables"), a.attention.query_heads, a.attention.key_heads);
  map.Describe(&a.attention);
  const std::vector<AttentionRow> found = PagedRows(&a.attention, rows, pages, first);
  a.attention.rows = found.data();
  a.attention.row_count = static_cast<int64_t>(found.size());
  const dcprt::Isa isa = ChosenIsa();
  for (int64_t i = 0; i < layers; ++i) {
    const AttentionCall own = PoolsOf(pools[2 * i], pools[2 * i + 1], x.size(0), key_head_of.numel(), scale);
    for (int dim = 0; dim < 4; ++dim) Check(pools[2 * i].size(dim) == first.size(dim), "pools differ in shape.");
    Check(own.kv_type == a.attention.kv_type, "pools differ in type.");
    a.attention.k = own.k;
    a.attention.v = own.v;
    SetWeights(weights, i, width, &a);
    if (a.attention.kv_type == FloatType::kFloat32) {
      dcprt::DecoderLayer<float>(a, isa, static_cast<int>(threads));
    } else {
      dcprt::DecoderLayer<BFloat16>(a, isa, static_cast<int>(threads));
    }
    a.add = a.out;
  }
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decoder_layers, Layers);
