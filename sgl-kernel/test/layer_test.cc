// A whole decoder layer against the same steps in double, alone and over ranks: two rows, one of which has a context.
#include "dcprt/layer.h"

#include <algorithm>
#include <vector>

#include "harness.h"
#include "ranks.h"

namespace dcprt::test {
namespace {

using Numbers = std::vector<double>;

struct Shape {
  size_t hidden, heads, key_heads, dim, width;
  bool add, bias, normed;  // of heads
  size_t ranks = 1;
};

double Rounded(double value, bool narrow) { return narrow ? ToFloat(ToBFloat16(static_cast<float>(value))) : value; }

// Packed [outs, ins].
struct Weights {
  Array packed;
  PackedMatrix matrix;

  template <class At>
  Weights(size_t outs, size_t ins, bool narrow, const At& at)
      : packed(0), matrix{nullptr, narrow ? FloatType::kBFloat16 : FloatType::kFloat32, outs, ins} {
    Array plain(outs * ins, narrow);
    for (size_t i = 0; i < plain.size(); ++i) plain.Set(i, at(i / ins, i % ins));
    packed = Array(matrix.Panels() * matrix.PanelElements(), narrow);
    PackMatrix(plain.data(), ins, matrix, packed.data());
    matrix.data = packed.data();
  }
};

template <class T>
class Problem {
 public:
  explicit Problem(const Shape& shape)
      : s_(shape), tokens_(s_.ranks == 1 ? 5 : 2), first_(s_.ranks == 1 ? 3 : 1), random_(shape.hidden + shape.dim),
        x_(tokens_ * s_.hidden), add_(x_.size()), norm1_(s_.hidden, kNarrow), norm2_(s_.hidden, kNarrow),
        q_norm_(s_.dim, kNarrow), k_norm_(s_.dim, kNarrow), qkv_bias_(Width(), kNarrow), o_bias_(s_.hidden, kNarrow),
        both_bias_(2 * s_.width, kNarrow), down_bias_(s_.hidden, kNarrow), cos_(tokens_ * s_.dim / 2), sin_(cos_.size()),
        k_(kPages * kPageSize * KeyWidth(), kNarrow), v_(k_.size(), kNarrow), qkv_(Width() * s_.hidden, kNarrow),
        o_(s_.hidden * s_.heads * s_.dim, kNarrow), both_(2 * s_.width * s_.hidden, kNarrow),
        down_(s_.hidden * s_.width, kNarrow) {
    for (Array* x : {&x_, &add_, &norm1_, &norm2_, &q_norm_, &k_norm_, &k_, &v_}) random_.Fill(*x);
    for (Array* x : {&qkv_bias_, &o_bias_, &both_bias_, &down_bias_}) random_.Fill(*x);
    for (Array* x : {&qkv_, &o_, &both_, &down_}) random_.Fill(*x, 0.5);
    for (size_t i = 0; i < cos_.size(); ++i) {
      const double angle = 3 * random_.Next();
      cos_.Set(i, std::cos(angle));
      sin_.Set(i, std::sin(angle));
    }
    for (size_t h = 0; h < s_.heads; ++h) heads_.push_back(static_cast<int64_t>(h));
    for (size_t g = 0; g <= s_.key_heads; ++g) offsets_.push_back(static_cast<int64_t>(g * s_.heads / s_.key_heads));
    for (size_t rank = 0; rank < s_.ranks; ++rank) parts_.push_back(PartOf(rank));
  }

  void Run() {
    const Numbers expected = Define();
    double size = 1;
    for (const double value : expected) size = std::max(size, std::fabs(value));
    std::vector<Value> values;
    for (const double value : expected) values.push_back({value, size * (kNarrow ? 0.05 : 2e-5)});
    for (const Isa isa : Isas()) {
      for (const int threads : {1, 2}) {
        for (const Array& found : OnRanks(isa, threads)) {
          ExpectValues(found, values, Label(kNarrow ? "layer bf16" : "layer", s_.hidden, s_.heads, s_.key_heads, s_.dim) +
                                          Label(" with", s_.add, s_.bias, s_.normed, threads, s_.ranks) + " " + NameOf(isa));
        }
      }
    }
  }

 private:
  static constexpr bool kNarrow = sizeof(T) == 2;
  // `first_` tokens after 6 others, then a row without others.
  static constexpr size_t kPages = 6, kPageSize = 4, kContext = 6;
  static constexpr int64_t kTable[] = {4, 1, 3, 5};  // pages of the first row, then of the second

  size_t Width() const { return (s_.heads + 2 * s_.key_heads) * s_.dim; }
  size_t KeyWidth() const { return s_.key_heads * s_.dim; }
  double Add(size_t i) const { return s_.add ? add_[i] : 0; }
  size_t Position(size_t token) const { return token < first_ ? kContext + token : token - first_; }
  // Of position `at`, counted on its rank, in the row of a token.
  size_t Slot(size_t token, size_t at) const {
    const int64_t page = kTable[(token < first_ ? 0 : 3) + at / kPageSize];
    return static_cast<size_t>(page) * kPageSize + at % kPageSize;
  }

  static Array Copy(const Array& from) {
    Array to(from.size(), from.narrow());
    for (size_t i = 0; i < from.size(); ++i) to.Set(i, from[i]);
    return to;
  }

  Numbers Norm(const Numbers& x, const Array& weight) const {
    Numbers out;
    for (size_t t = 0; t < tokens_; ++t) {
      double squares = 0;
      for (size_t i = 0; i < s_.hidden; ++i) squares += x[t * s_.hidden + i] * x[t * s_.hidden + i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(s_.hidden) + 1e-5);
      for (size_t i = 0; i < s_.hidden; ++i) out.push_back(Rounded(x[t * s_.hidden + i] * scale * weight[i], kNarrow));
    }
    return out;
  }

  Numbers Times(const Numbers& x, const Array& w, const Array* bias, bool round) const {
    Numbers out;
    const size_t ins = x.size() / tokens_;
    for (size_t t = 0; t < tokens_; ++t) {
      for (size_t o = 0; o < w.size() / ins; ++o) {
        double sum = bias == nullptr ? 0 : (*bias)[o];
        for (size_t i = 0; i < ins; ++i) sum += Rounded(x[t * ins + i], kNarrow) * w[o * ins + i];
        out.push_back(round ? Rounded(sum, kNarrow) : sum);
      }
    }
    return out;
  }

  void NormHead(double* x, const Array& weight) const {
    double squares = 0;
    for (size_t i = 0; i < s_.dim; ++i) squares += x[i] * x[i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(s_.dim) + 1e-5);
    for (size_t i = 0; i < s_.dim; ++i) x[i] = Rounded(x[i] * scale * weight[i], kNarrow);
  }

  // Norms and turns queries and keys, and stores keys and values.
  void TurnAndStore(Numbers* qkv, Numbers* k, Numbers* v) const {
    for (size_t t = 0; t < tokens_; ++t) {
      for (size_t h = 0; h < s_.heads + s_.key_heads; ++h) {
        double* x = qkv->data() + t * Width() + h * s_.dim;
        if (s_.normed) NormHead(x, h < s_.heads ? q_norm_ : k_norm_);
        for (size_t i = 0; i < s_.dim / 2; ++i) {
          const double a = x[i], b = x[s_.dim / 2 + i], c = cos_[t * s_.dim / 2 + i], s = sin_[t * s_.dim / 2 + i];
          x[i] = Rounded(a * c - b * s, kNarrow);
          x[s_.dim / 2 + i] = Rounded(b * c + a * s, kNarrow);
        }
      }
      for (size_t i = 0; i < KeyWidth(); ++i) {
        const size_t at = Slot(t, Position(t)) * KeyWidth() + i;
        (*k)[at] = (*qkv)[t * Width() + s_.heads * s_.dim + i];
        (*v)[at] = (*qkv)[t * Width() + s_.heads * s_.dim + KeyWidth() + i];
      }
    }
  }

  Numbers Attended(const Numbers& qkv, const Numbers& k, const Numbers& v) const {
    Numbers out(tokens_ * s_.heads * s_.dim);
    for (size_t t = 0; t < tokens_; ++t) {
      for (size_t h = 0; h < s_.heads; ++h) {
        const size_t key_head = h * s_.key_heads / s_.heads;
        double total = 0;
        for (size_t at = 0; at <= Position(t); ++at) {
          const size_t from = Slot(t, at) * KeyWidth() + key_head * s_.dim;
          double score = 0;
          for (size_t i = 0; i < s_.dim; ++i) score += qkv[t * Width() + h * s_.dim + i] * k[from + i];
          const double weight = std::exp(score * kScale);
          total += weight;
          for (size_t i = 0; i < s_.dim; ++i) out[(t * s_.heads + h) * s_.dim + i] += weight * v[from + i];
        }
        for (size_t i = 0; i < s_.dim; ++i) out[(t * s_.heads + h) * s_.dim + i] /= total;
      }
    }
    return out;
  }

  // What the layer leaves to be added, then the residual.
  Numbers Define() const {
    Numbers x, k, v, gated;
    for (size_t i = 0; i < x_.size(); ++i) x.push_back(x_[i] + Add(i));
    for (size_t i = 0; i < k_.size(); ++i) k.push_back(k_[i]), v.push_back(v_[i]);
    Numbers qkv = Times(Norm(x, norm1_), qkv_, s_.bias ? &qkv_bias_ : nullptr, true);
    TurnAndStore(&qkv, &k, &v);
    const Numbers added = Times(Attended(qkv, k, v), o_, s_.bias ? &o_bias_ : nullptr, false);
    for (size_t i = 0; i < x.size(); ++i) x[i] += added[i];
    const Numbers both = Times(Norm(x, norm2_), both_, s_.bias ? &both_bias_ : nullptr, true);
    for (size_t t = 0; t < tokens_; ++t) {
      for (size_t i = 0; i < s_.width; ++i) {
        const double gate = both[t * 2 * s_.width + i];
        gated.push_back(Rounded(gate / (1 + std::exp(-gate)) * both[(2 * t + 1) * s_.width + i], kNarrow));
      }
    }
    Numbers out = Times(gated, down_, s_.bias ? &down_bias_ : nullptr, false);
    out.insert(out.end(), x.begin(), x.end());
    return out;
  }

  // What one rank has: its share of heads, of the MLP, and of the tokens, which go round.
  struct Part {
    Weights qkv, o, both, down;
    Array qkv_bias, both_bias, k, v;
  };

  size_t Heads() const { return s_.heads / s_.ranks; }
  size_t MlpWidth() const { return s_.width / s_.ranks; }
  // Outputs of the whole products, from those of a rank.
  size_t QkvOf(size_t rank, size_t out) const {
    return out < Heads() * s_.dim ? rank * Heads() * s_.dim + out : out + (s_.heads - Heads()) * s_.dim;
  }
  size_t BothOf(size_t rank, size_t out) const {
    return out / MlpWidth() * s_.width + rank * MlpWidth() + out % MlpWidth();
  }

  Part PartOf(size_t rank) const {
    const size_t queries = Heads() * s_.dim, width = queries + 2 * KeyWidth(), hidden = s_.hidden;
    const size_t head = rank * queries, unit = rank * MlpWidth();
    Part part{
        Weights(width, hidden, kNarrow, [&](size_t o, size_t i) { return qkv_[QkvOf(rank, o) * hidden + i]; }),
        Weights(hidden, queries, kNarrow, [&](size_t o, size_t i) { return o_[o * s_.heads * s_.dim + head + i]; }),
        Weights(2 * MlpWidth(), hidden, kNarrow, [&](size_t o, size_t i) { return both_[BothOf(rank, o) * hidden + i]; }),
        Weights(hidden, MlpWidth(), kNarrow, [&](size_t o, size_t i) { return down_[o * s_.width + unit + i]; }),
        Array(width, kNarrow), Array(2 * MlpWidth(), kNarrow), Array(k_.size(), kNarrow), Array(k_.size(), kNarrow)};
    for (size_t i = 0; i < width; ++i) part.qkv_bias.Set(i, qkv_bias_[QkvOf(rank, i)]);
    for (size_t i = 0; i < 2 * MlpWidth(); ++i) part.both_bias.Set(i, both_bias_[BothOf(rank, i)]);
    for (size_t at = rank; at < kContext; at += s_.ranks) {
      for (size_t i = 0; i < KeyWidth(); ++i) {
        const size_t to = Slot(0, at / s_.ranks) * KeyWidth() + i, from = Slot(0, at) * KeyWidth() + i;
        part.k.Set(to, k_[from]);
        part.v.Set(to, v_[from]);
      }
    }
    return part;
  }

  // Of every rank: what the layer leaves to be added, then the residual.
  std::vector<Array> OnRanks(Isa isa, int threads) {
    std::vector<Array> found;
    for (size_t rank = 0; rank < s_.ranks; ++rank) found.emplace_back(2 * x_.size());
    const uint32_t ranks = static_cast<uint32_t>(s_.ranks);
    const Arena world(ranks, 4096, false), dcp(ranks, 4096, false);
    const bool ok = OnThreads(ranks, [&](uint32_t rank) {
      ShmGroup groups[] = {world.Group(rank), dcp.Group(rank)};
      const bool alone = ranks == 1;
      return Call(rank, alone ? Ranks{} : Ranks{&groups[0], 60}, alone ? Ranks{} : Ranks{&groups[1], 60}, found[rank], isa,
                  threads);
    });
    Expect(ok, "the ranks met");
    return found;
  }

  bool Call(size_t rank, const Ranks& world, const Ranks& dcp, Array& found, Isa isa, int threads) const {
    const Part& part = parts_[rank];
    Array x = Copy(x_), add = Copy(add_), k = Copy(part.k), v = Copy(part.v);
    std::vector<int64_t> tokens, slots;
    for (size_t t = 0; t < tokens_; ++t) {
      if (Position(t) % s_.ranks != rank) continue;
      tokens.push_back(static_cast<int64_t>(t));
      slots.push_back(static_cast<int64_t>(Slot(t, Position(t) / s_.ranks)));
    }
    // Of the first `count` positions; over ranks, own tokens are among the keys.
    const auto local = [&](size_t count) { return static_cast<int64_t>((count + s_.ranks - 1 - rank) / s_.ranks); };
    const int64_t first = static_cast<int64_t>(first_), all = static_cast<int64_t>(tokens_);
    const AttentionRow rows[] = {{0, first, local(kContext + first_), 0, 0, kContext}, {first, all, local(tokens_ - first_), 3, 0, 0}};
    LayerArgs a{};
    a.x = x.as<float>();
    a.add = s_.add ? add.as<float>() : nullptr;
    a.out = found.as<float>();
    a.hidden = s_.hidden;
    a.norm1 = norm1_.data(), a.norm2 = norm2_.data();
    if (s_.normed) a.q_norm = q_norm_.data(), a.k_norm = k_norm_.data();
    a.eps = 1e-5f;
    a.qkv = part.qkv.matrix, a.o = part.o.matrix, a.gate_up = part.both.matrix, a.down = part.down.matrix;
    a.qkv_bias = s_.bias ? part.qkv_bias.data() : nullptr;
    a.o_bias = s_.bias ? o_bias_.data() : nullptr;
    a.down_bias = s_.bias ? down_bias_.data() : nullptr;
    a.gate_up_bias = s_.bias ? part.both_bias.data() : nullptr;
    a.projected = Heads();
    a.world = world, a.dcp = dcp;
    a.cos = cos_.as<float>(), a.sin = sin_.as<float>(), a.half = s_.dim / 2;
    a.tokens = tokens.data(), a.slots = slots.data(), a.stored = tokens.size();
    AttentionCall& call = a.attention;
    const int64_t dim = static_cast<int64_t>(s_.dim), step = static_cast<int64_t>(KeyWidth());
    call.q_type = call.kv_type = part.qkv.matrix.type;
    call.k = {k.data(), static_cast<int64_t>(kPageSize) * step, step, dim};
    call.v = {v.data(), static_cast<int64_t>(kPageSize) * step, step, dim};
    call.pages = kTable, call.page_size = kPageSize;
    call.tokens = all;
    call.query_heads = static_cast<int64_t>(s_.heads), call.key_heads = static_cast<int64_t>(s_.key_heads);
    call.key_dim = call.value_dim = dim;
    call.heads = heads_.data(), call.head_offsets = offsets_.data();
    call.rows = rows, call.row_count = 2;
    call.causal = s_.ranks == 1;
    call.scale = static_cast<float>(kScale);
    const bool ok = DecoderLayer<T>(a, isa, threads);
    for (size_t i = 0; i < x.size(); ++i) found.Set(x.size() + i, x[i]);
    return ok;
  }

  static constexpr double kScale = 0.3;
  Shape s_;
  size_t tokens_, first_;
  Random random_;
  Array x_, add_, norm1_, norm2_, q_norm_, k_norm_, qkv_bias_, o_bias_, both_bias_, down_bias_, cos_, sin_, k_, v_, qkv_, o_, both_, down_;
  std::vector<int64_t> heads_, offsets_;
  std::vector<Part> parts_;
};

template <class T>
void TestType() {
  for (const bool with : {false, true}) {
    Problem<T>({24, 3, 1, 8, 20, with, !with, with}).Run();
    Problem<T>({37, 4, 2, 16, 33, with, with, false}).Run();
    Problem<T>({48, 6, 6, 24, 5, !with, with, true}).Run();
    Problem<T>({37, 4, 2, 16, 34, with, with, !with, 2}).Run();
    Problem<T>({24, 9, 3, 8, 21, !with, with, with, 3}).Run();
  }
}

}  // namespace

void TestLayer() {
  TestType<float>();
  TestType<BFloat16>();
}

}  // namespace dcprt::test
