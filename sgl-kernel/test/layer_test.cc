// A whole decoder layer against the same steps in double: two rows, one of which has a context already.
#include "dcprt/layer.h"

#include <algorithm>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

using Numbers = std::vector<double>;

struct Shape {
  size_t hidden, heads, key_heads, dim, width;
  bool add, bias;
};

double Rounded(double value, bool narrow) { return narrow ? ToFloat(ToBFloat16(static_cast<float>(value))) : value; }

// A matrix as it is, and packed.
struct Weights {
  Array plain, packed;
  PackedMatrix matrix;

  Weights(size_t outs, size_t ins, bool narrow, Random& random)
      : plain(outs * ins, narrow), packed(0),
        matrix{nullptr, narrow ? FloatType::kBFloat16 : FloatType::kFloat32, outs, ins} {
    random.Fill(plain, 0.5);
    packed = Array(matrix.Panels() * matrix.PanelElements(), narrow);
    PackMatrix(plain.data(), ins, matrix, packed.data());
    matrix.data = packed.data();
  }
};

template <class T>
class Problem {
 public:
  explicit Problem(const Shape& shape)
      : s_(shape), random_(shape.hidden + shape.dim), x_(kTokens * s_.hidden), add_(x_.size()), norm1_(s_.hidden, kNarrow),
        norm2_(s_.hidden, kNarrow), qkv_bias_(Width(), kNarrow), both_bias_(2 * s_.width, kNarrow),
        cos_(kTokens * s_.dim / 2), sin_(kTokens * s_.dim / 2), k_(kPages * kPageSize * KeyWidth(), kNarrow),
        v_(kPages * kPageSize * KeyWidth(), kNarrow), qkv_(Width(), s_.hidden, kNarrow, random_),
        o_(s_.hidden, s_.heads * s_.dim, kNarrow, random_), both_(2 * s_.width, s_.hidden, kNarrow, random_),
        down_(s_.hidden, s_.width, kNarrow, random_) {
    for (Array* x : {&x_, &add_, &norm1_, &norm2_, &qkv_bias_, &both_bias_, &k_, &v_}) random_.Fill(*x);
    for (size_t i = 0; i < cos_.size(); ++i) {
      const double angle = 3 * random_.Next();
      cos_.Set(i, std::cos(angle));
      sin_.Set(i, std::sin(angle));
    }
    for (size_t h = 0; h < s_.heads; ++h) heads_.push_back(static_cast<int64_t>(h));
    for (size_t g = 0; g <= s_.key_heads; ++g) offsets_.push_back(static_cast<int64_t>(g * s_.heads / s_.key_heads));
  }

  void Run() {
    const Numbers expected = Define();
    double size = 1;
    for (const double value : expected) size = std::max(size, std::fabs(value));
    std::vector<Value> values;
    for (const double value : expected) values.push_back({value, size * (kNarrow ? 0.05 : 2e-5)});
    for (const Isa isa : Isas()) {
      for (const int threads : {1, 2}) {
        Array found(expected.size());
        const Array keys = Copy(k_), own = Copy(v_);
        Call(found, keys, own, isa, threads);
        ExpectValues(found, values, Label(kNarrow ? "layer bf16" : "layer", s_.hidden, s_.heads, s_.key_heads, s_.dim) +
                                        Label(" with", s_.add, s_.bias, threads) + " " + NameOf(isa));
      }
    }
  }

 private:
  static constexpr bool kNarrow = sizeof(T) == 2;
  static constexpr size_t kTokens = 5, kPages = 6, kPageSize = 4, kFirst = 3, kContext = 6;  // 3 tokens after 6, then 2
  static constexpr int64_t kTable[] = {4, 1, 3, 5};  // pages of the first row, then of the second

  size_t Width() const { return (s_.heads + 2 * s_.key_heads) * s_.dim; }
  size_t KeyWidth() const { return s_.key_heads * s_.dim; }
  double Add(size_t i) const { return s_.add ? add_[i] : 0; }
  static size_t Position(size_t token) { return token < kFirst ? kContext + token : token - kFirst; }
  // Of position `at` in the row of a token.
  static size_t Slot(size_t token, size_t at) {
    const int64_t page = kTable[(token < kFirst ? 0 : 3) + at / kPageSize];
    return static_cast<size_t>(page) * kPageSize + at % kPageSize;
  }

  static Array Copy(const Array& from) {
    Array to(from.size(), from.narrow());
    for (size_t i = 0; i < from.size(); ++i) to.Set(i, from[i]);
    return to;
  }

  Numbers Norm(const Numbers& x, const Array& weight) const {
    Numbers out;
    for (size_t t = 0; t < kTokens; ++t) {
      double squares = 0;
      for (size_t i = 0; i < s_.hidden; ++i) squares += x[t * s_.hidden + i] * x[t * s_.hidden + i];
      const double scale = 1 / std::sqrt(squares / static_cast<double>(s_.hidden) + 1e-5);
      for (size_t i = 0; i < s_.hidden; ++i) out.push_back(Rounded(x[t * s_.hidden + i] * scale * weight[i], kNarrow));
    }
    return out;
  }

  Numbers Times(const Numbers& x, const Weights& w, const Array* bias, bool round) const {
    Numbers out;
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t o = 0; o < w.matrix.outs; ++o) {
        double sum = bias == nullptr ? 0 : (*bias)[o];
        for (size_t i = 0; i < w.matrix.ins; ++i) {
          sum += Rounded(x[t * w.matrix.ins + i], kNarrow) * w.plain[o * w.matrix.ins + i];
        }
        out.push_back(round ? Rounded(sum, kNarrow) : sum);
      }
    }
    return out;
  }

  // Turns queries and keys, and stores keys and values.
  void TurnAndStore(Numbers* qkv, Numbers* k, Numbers* v) const {
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t h = 0; h < s_.heads + s_.key_heads; ++h) {
        double* x = qkv->data() + t * Width() + h * s_.dim;
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
    Numbers out(kTokens * s_.heads * s_.dim);
    for (size_t t = 0; t < kTokens; ++t) {
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
    const Numbers added = Times(Attended(qkv, k, v), o_, nullptr, false);
    for (size_t i = 0; i < x.size(); ++i) x[i] += added[i];
    const Numbers both = Times(Norm(x, norm2_), both_, s_.bias ? &both_bias_ : nullptr, true);
    for (size_t t = 0; t < kTokens; ++t) {
      for (size_t i = 0; i < s_.width; ++i) {
        const double gate = both[t * 2 * s_.width + i];
        gated.push_back(Rounded(gate / (1 + std::exp(-gate)) * both[(2 * t + 1) * s_.width + i], kNarrow));
      }
    }
    Numbers out = Times(gated, down_, nullptr, false);
    out.insert(out.end(), x.begin(), x.end());
    return out;
  }

  void Call(Array& found, const Array& k, const Array& v, Isa isa, int threads) const {
    Array x = Copy(x_), add = Copy(add_);
    const int64_t tokens[kTokens] = {0, 1, 2, 3, 4};
    int64_t slots[kTokens];
    for (size_t t = 0; t < kTokens; ++t) slots[t] = static_cast<int64_t>(Slot(t, Position(t)));
    const AttentionRow rows[] = {{0, kFirst, kContext + kFirst, 0, 0, kContext}, {kFirst, kTokens, kTokens - kFirst, 3, 0, 0}};
    LayerArgs a{};
    a.x = x.as<float>();
    a.add = s_.add ? add.as<float>() : nullptr;
    a.out = found.as<float>();
    a.hidden = s_.hidden;
    a.norm1 = norm1_.data(), a.norm2 = norm2_.data();
    a.eps = 1e-5f;
    a.qkv = qkv_.matrix, a.o = o_.matrix, a.gate_up = both_.matrix, a.down = down_.matrix;
    a.qkv_bias = s_.bias ? qkv_bias_.data() : nullptr;
    a.gate_up_bias = s_.bias ? both_bias_.data() : nullptr;
    a.cos = cos_.as<float>(), a.sin = sin_.as<float>(), a.half = s_.dim / 2;
    a.tokens = tokens, a.slots = slots, a.stored = kTokens;
    AttentionCall& call = a.attention;
    const int64_t dim = static_cast<int64_t>(s_.dim), step = static_cast<int64_t>(KeyWidth());
    call.q_type = call.kv_type = qkv_.matrix.type;
    call.k = {k.data(), static_cast<int64_t>(kPageSize) * step, step, dim};
    call.v = {v.data(), static_cast<int64_t>(kPageSize) * step, step, dim};
    call.pages = kTable, call.page_size = kPageSize;
    call.tokens = kTokens;
    call.query_heads = static_cast<int64_t>(s_.heads), call.key_heads = static_cast<int64_t>(s_.key_heads);
    call.key_dim = call.value_dim = dim;
    call.heads = heads_.data(), call.head_offsets = offsets_.data();
    call.rows = rows, call.row_count = 2;
    call.causal = true;
    call.scale = static_cast<float>(kScale);
    DecoderLayer<T>(a, isa, threads);
    for (size_t i = 0; i < x.size(); ++i) found.Set(x.size() + i, x[i]);
  }

  static constexpr double kScale = 0.3;
  Shape s_;
  Random random_;
  Array x_, add_, norm1_, norm2_, qkv_bias_, both_bias_, cos_, sin_, k_, v_;
  Weights qkv_, o_, both_, down_;
  std::vector<int64_t> heads_, offsets_;
};

template <class T>
void TestType() {
  for (const bool with : {false, true}) {
    Problem<T>({24, 3, 1, 8, 20, with, !with}).Run();
    Problem<T>({37, 4, 2, 16, 33, with, with}).Run();
    Problem<T>({48, 6, 6, 24, 5, !with, with}).Run();
  }
}

}  // namespace

void TestLayer() {
  TestType<float>();
  TestType<BFloat16>();
}

}  // namespace dcprt::test
