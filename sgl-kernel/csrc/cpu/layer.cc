// Binding of whole decoder layers.
#include "dcprt/layer.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <memory>
#include <vector>

#include "attention_rows.h"
#include "checks.h"
#include "shm_handle.h"

namespace {

using namespace dcprt::binding;
using dcprt::AttentionCall;
using dcprt::AttentionRow;
using dcprt::BFloat16;
using dcprt::FloatType;
using dcprt::LayerArgs;
using dcprt::PackedMatrix;
using dcprt::Ranks;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

// Everything of the attention that does not change from step to step.
AttentionCall PoolsOf(const TensorView& k, const TensorView& v, int64_t heads, double scale, bool causal) {
  Check(k.ndim() == 4 && v.ndim() == 4 && k.IsContiguous() && v.IsContiguous(), "pools are [pages, size, heads, dim].");
  for (int i = 0; i < 4; ++i) Check(k.size(i) == v.size(i), "keys and values differ in shape.");
  Check(TypeOf(k) == TypeOf(v), "keys and values differ in dtype.");
  Check(k.size(3) % 8 == 0, "dimensions of heads are multiples of 8.");
  AttentionCall call{};
  call.q_type = call.kv_type = TypeOf(k);
  call.k = {Data(k), k.stride(0), k.stride(1), k.stride(2)};
  call.v = {Data(v), v.stride(0), v.stride(1), v.stride(2)};
  call.query_heads = heads;
  call.key_heads = k.size(2);
  call.key_dim = call.value_dim = k.size(3);
  call.causal = causal;
  Check(scale > 0, "the scale is not positive.");
  call.scale = static_cast<float>(scale);
  return call;
}

// Of one layer, in the order of the Python wrapper.
enum Weight {
  kNorm1, kNorm2, kQNorm, kKNorm, kQkv, kQkvBias, kO, kOBias, kGateUp, kGateUpBias, kDown, kDownBias, kWeights
};

const void* BiasIn(const TensorView& bias, const PackedMatrix& matrix) {
  return bias.numel() == 0 ? nullptr : BiasOf(bias, matrix);
}

// Norms and matrices of layer `i`; what they are multiplied with is in `a` already.
void SetWeights(const Array<Tensor>& weights, int64_t i, int64_t width, LayerArgs* a) {
  const auto of = [&](Weight weight) { return TensorView(weights[i * kWeights + weight]); };
  const AttentionCall& call = a->attention;
  const int64_t own = call.query_heads / static_cast<int64_t>(a->dcp.Size()), dim = call.key_dim;
  const int64_t hidden = of(kNorm1).numel();
  const FloatType type = call.kv_type;
  for (const Weight norm : {kNorm1, kNorm2}) {
    CheckDense(of(norm), 1, type, "a norm");
    Check(of(norm).size(0) == hidden, "the norms differ in length.");
  }
  const auto head_norm = [&](Weight norm) {
    CheckDense(of(norm), 1, type, "a norm of heads");
    Check(of(norm).size(0) == 0 || of(norm).size(0) == dim, "a norm of heads is not as long as a head.");
    return of(norm).size(0) == 0 ? nullptr : Data(of(norm));
  };
  a->q_norm = head_norm(kQNorm);
  a->k_norm = head_norm(kKNorm);
  Check((a->q_norm == nullptr) == (a->k_norm == nullptr), "queries and keys are both normed, or neither.");
  a->hidden = static_cast<size_t>(hidden);
  a->norm1 = Data(of(kNorm1));
  a->norm2 = Data(of(kNorm2));
  a->qkv = MatrixOf(of(kQkv), (static_cast<int64_t>(a->projected) + 2 * call.key_heads) * dim, hidden);
  a->o = MatrixOf(of(kO), hidden, own * dim);
  a->gate_up = MatrixOf(of(kGateUp), 2 * width, hidden);
  a->down = MatrixOf(of(kDown), hidden, width);
  for (const auto* m : {&a->qkv, &a->o, &a->gate_up, &a->down}) Check(m->type == type, "the weights differ in type.");
  a->qkv_bias = BiasIn(of(kQkvBias), a->qkv);
  a->o_bias = BiasIn(of(kOBias), a->o);
  a->gate_up_bias = BiasIn(of(kGateUpBias), a->gate_up);
  a->down_bias = BiasIn(of(kDownBias), a->down);
}

Ranks RanksOf(int64_t handle, double timeout_s) {
  if (handle == 0) return {};
  return {&GroupOf(handle), timeout_s};
}

// Layers whose weights and pools are checked, and what holds these.
class Layers {
 public:
  Layers(const Array<Tensor>& weights, const Array<Tensor>& pools, double eps, int64_t width, const TensorView& key_head_of,
         int64_t projected, double scale, const Ranks& world, const Ranks& dcp)
      : weights_(weights), pools_(pools) {
    const int64_t count = static_cast<int64_t>(weights.size()) / kWeights, heads = key_head_of.numel();
    Check(count > 0 && count * kWeights == static_cast<int64_t>(weights.size()), "weights are those of whole layers.");
    Check(static_cast<int64_t>(pools.size()) == 2 * count, "there are two pools for each layer.");
    const int64_t ranks = static_cast<int64_t>(dcp.Size());
    Check(ranks <= static_cast<int64_t>(dcprt::kMostParts), "there are too many ranks.");
    Check(heads % ranks == 0, "the query heads do not divide by the ranks.");
    Check(projected == heads || projected == heads / ranks, "queries are projected for the own heads, or for all.");
    const TensorView first = pools_[0];
    for (int64_t i = 0; i < count; ++i) {
      const TensorView k = pools_[2 * i];
      LayerArgs a{};
      a.attention = PoolsOf(k, pools_[2 * i + 1], heads, scale, dcp.group == nullptr);
      for (int dim = 0; dim < 4; ++dim) Check(k.size(dim) == first.size(dim), "pools differ in shape.");
      Check(TypeOf(k) == TypeOf(first), "pools differ in type.");
      a.eps = static_cast<float>(eps);
      a.projected = static_cast<size_t>(projected);
      a.world = world;
      a.dcp = dcp;
      SetWeights(weights_, i, width, &a);
      Check(i == 0 || a.hidden == layers_[0].hidden, "the layers differ in width.");
      layers_.push_back(a);
    }
    map_ = std::make_unique<HeadMap>(Ints(key_head_of, "tables"), heads, first.size(2));
  }

  // 0, or which group failed: 1 the world, 2 that of dcp.
  int64_t Run(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& tokens,
              const TensorView& slots, const TensorView& rows, const TensorView& pages, const TensorView& out,
              const TensorView& ends, int64_t threads) const {
    const int64_t noted = static_cast<int64_t>(layers_.size()) * dcprt::kLayerParts;
    Check(ends.numel() == 0 || ends.numel() == noted, "ends are those of the parts of all layers, or none.");
    int64_t* times = ends.numel() == 0 ? nullptr : const_cast<int64_t*>(Ints(ends, "ends"));
    LayerArgs step = layers_[0];
    SetStep(x, cos, sin, tokens, slots, out, &step);
    const std::vector<AttentionRow> found = PagedRows(&step.attention, rows, pages, pools_[0]);
    const dcprt::Isa isa = ChosenIsa();
    const float* add = nullptr;
    for (const LayerArgs& layer : layers_) {
      LayerArgs a = layer;
      a.x = step.x, a.add = add, a.out = step.out;
      a.cos = step.cos, a.sin = step.sin, a.half = step.half;
      a.tokens = step.tokens, a.slots = step.slots, a.stored = step.stored;
      AttentionCall& call = a.attention;
      call.tokens = step.attention.tokens;
      call.pages = step.attention.pages, call.page_size = step.attention.page_size;
      map_->Describe(&call);
      a.ends = times == nullptr ? nullptr : times + (&layer - layers_.data()) * dcprt::kLayerParts;
      call.rows = found.data(), call.row_count = static_cast<int64_t>(found.size());
      const auto run = call.kv_type == FloatType::kFloat32 ? dcprt::DecoderLayer<float> : dcprt::DecoderLayer<BFloat16>;
      if (!run(a, isa, static_cast<int>(threads))) {
        return a.world.group != nullptr && a.world.group->status() != dcprt::Status::kDone ? 1 : 2;
      }
      add = a.out;
    }
    return 0;
  }

 private:
  // What all layers have in common.
  void SetStep(const TensorView& x, const TensorView& cos, const TensorView& sin, const TensorView& tokens,
               const TensorView& slots, const TensorView& out, LayerArgs* a) const {
    CheckDense(x, 2, FloatType::kFloat32, "x");
    CheckDense(out, 2, FloatType::kFloat32, "out");
    Check(out.size(0) == x.size(0) && out.size(1) == x.size(1), "out differs from x in shape.");
    Check(x.size(0) > 0, "a layer needs a token.");
    Check(Size(x, 1) == a->hidden, "a row is not as long as a norm.");
    a->x = Data<float>(x);
    a->out = Data<float>(out);
    a->attention.tokens = x.size(0);
    Check(TypeOf(cos) == FloatType::kFloat32 && TypeOf(sin) == FloatType::kFloat32, "cos and sin are float32.");
    Check(cos.IsContiguous() && sin.IsContiguous() && cos.numel() == sin.numel(), "cos and sin must be alike.");
    const int64_t half = cos.numel() / x.size(0);
    Check(half * x.size(0) == cos.numel() && 2 * half <= a->attention.key_dim, "cos is not [tokens, <= dim / 2].");
    a->half = static_cast<size_t>(half);
    a->cos = Data<float>(cos);
    a->sin = Data<float>(sin);
    CheckStores(tokens, slots, x.size(0), pools_[0]);
    a->tokens = Ints(tokens, "tokens");
    a->slots = Ints(slots, "slots");
    a->stored = static_cast<size_t>(tokens.numel());
  }

  Array<Tensor> weights_, pools_;
  std::vector<LayerArgs> layers_;
  std::unique_ptr<HeadMap> map_;
};

Function LayersOf(Array<Tensor> weights, Array<Tensor> pools, double eps, int64_t width, TensorView key_head_of,
                  int64_t projected, double scale, int64_t world, int64_t dcp, double timeout_s) {
  const auto layers = std::make_shared<const Layers>(weights, pools, eps, width, key_head_of, projected, scale,
                                                     RanksOf(world, timeout_s), RanksOf(dcp, timeout_s));
  return Function::FromTyped([layers](TensorView x, TensorView cos, TensorView sin, TensorView tokens, TensorView slots,
                                      TensorView rows, TensorView pages, TensorView out, TensorView ends,
                                      int64_t threads) {
    return layers->Run(x, cos, sin, tokens, slots, rows, pages, out, ends, threads);
  });
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(decoder_layers, LayersOf);
