// A norm with the products behind it, against the same steps in double.
#include "dcprt/fused.h"

#include <string>
#include <vector>

#include "harness.h"

namespace dcprt::test {
namespace {

using Matrix = std::vector<double>;  // [rows, columns]

double Rounded(double value, bool narrow) { return narrow ? ToFloat(ToBFloat16(static_cast<float>(value))) : value; }

// x [rows, ins] * weight [outs, ins]^T + bias.
Matrix Product(const Matrix& x, const Array& weight, const Array* bias, size_t ins, size_t outs) {
  Matrix out;
  for (size_t at = 0; at + ins <= x.size() && ins > 0; at += ins) {
    for (size_t o = 0; o < outs; ++o) {
      double sum = bias == nullptr ? 0 : (*bias)[o];
      for (size_t i = 0; i < ins; ++i) sum += x[at + i] * weight[o * ins + i];
      out.push_back(sum);
    }
  }
  return out;
}

// Weights in the type `T` and everything that is computed from them.
template <class T>
class Layer {
 public:
  Layer(size_t rows, size_t hidden, size_t width, bool with_add, bool with_bias)
      : rows_(rows), hidden_(hidden), width_(width), with_add_(with_add), with_bias_(with_bias),
        x_(rows * hidden, false, 1), add_(rows * hidden, false, 1), norm_(hidden, kNarrow, 1),
        first_(2 * width * hidden, kNarrow, 1), bias_(2 * width, kNarrow, 1), second_(hidden * width, kNarrow, 1),
        gate_up_{nullptr, kType, 2 * width, hidden}, down_{nullptr, kType, hidden, width},
        packed_first_(gate_up_.Panels() * gate_up_.PanelElements(), kNarrow, 1),
        packed_second_(down_.Panels() * down_.PanelElements(), kNarrow, 1) {
    Random random(hidden + width);
    for (Array* x : {&x_, &add_, &norm_, &first_, &bias_, &second_}) random.Fill(*x);
    gate_up_.data = packed_first_.data();
    down_.data = packed_second_.data();
    PackMatrix(first_.data(), hidden, gate_up_, packed_first_.data());
    PackMatrix(second_.data(), width, down_, packed_second_.data());
  }

  void Run() const {
    const Matrix normed = Norm();
    const Matrix both = Product(normed, first_, with_bias_ ? &bias_ : nullptr, hidden_, 2 * width_);
    Matrix gated;
    for (size_t row = 0; row < rows_; ++row) {
      for (size_t i = 0; i < width_; ++i) {
        const double gate = Rounded(both[row * 2 * width_ + i], kNarrow);
        const double up = Rounded(both[row * 2 * width_ + width_ + i], kNarrow);
        gated.push_back(Rounded(gate / (1 + std::exp(-gate)) * up, kNarrow));
      }
    }
    const Matrix out = Product(gated, second_, nullptr, width_, hidden_);
    for (const Isa isa : Isas()) {
      for (const int threads : {1, 2}) Check(isa, threads, Expected(both, hidden_), Expected(out, 3 * width_));
    }
  }

 private:
  static constexpr bool kNarrow = sizeof(T) == 2;
  static constexpr FloatType kType = kNarrow ? FloatType::kBFloat16 : FloatType::kFloat32;

  Matrix Norm() const {
    Matrix normed;
    for (size_t row = 0; row < rows_; ++row) {
      double squares = 0;
      const auto sum = [&](size_t i) { return x_[row * hidden_ + i] + (with_add_ ? add_[row * hidden_ + i] : 0); };
      for (size_t i = 0; i < hidden_; ++i) squares += sum(i) * sum(i);
      const double scale = 1 / std::sqrt(squares / static_cast<double>(hidden_) + 1e-5);
      for (size_t i = 0; i < hidden_; ++i) normed.push_back(Rounded(sum(i) * scale * norm_[i], kNarrow));
    }
    return normed;
  }

  // A value between two bfloat16 may be rounded either way, at every step: errors grow with the number of terms.
  static std::vector<Value> Expected(const Matrix& exact, size_t terms) {
    double size = 1;
    for (const double value : exact) size = std::max(size, std::fabs(value));
    const double unit = kNarrow ? 1.0 / 256 : 1e-6;
    std::vector<Value> expected;
    for (const double value : exact) expected.push_back({value, size * unit * (2 + std::sqrt(terms) / 4)});
    return expected;
  }

  void Check(Isa isa, int threads, const std::vector<Value>& both, const std::vector<Value>& out) const {
    const std::string where = Label(kNarrow ? "fused bf16" : "fused", rows_, hidden_, width_, with_add_, with_bias_) +
                              " " + NameOf(isa) + Label(" threads", threads);
    const T* bias = with_bias_ ? bias_.as<T>() : nullptr;
    Array summed = Copy(), found(both.size(), kNarrow, 1);
    NormLinear(Args(summed), gate_up_, bias, found.as<T>(), isa, threads);
    ExpectValues(found, both, where + " linear");
    for (size_t i = 0; i < summed.size(); ++i) {
      const float sum = static_cast<float>(x_[i]) + (with_add_ ? static_cast<float>(add_[i]) : 0.0f);
      if (summed[i] != sum) return Expect(false, where + " sum");
    }
    Array again = Copy(), whole(rows_ * hidden_, false, 1);
    NormGatedMlp(Args(again), gate_up_, bias, down_, whole.as<float>(), isa, threads);
    ExpectValues(whole, out, where + " mlp");
  }

  Array Copy() const {
    Array copy(x_.size(), false, 1);
    for (size_t i = 0; i < x_.size(); ++i) copy.Set(i, x_[i]);
    return copy;
  }
  NormArgs<T> Args(const Array& x) const {
    return {x.as<float>(), with_add_ ? add_.as<float>() : nullptr, norm_.as<T>(), 1e-5f, rows_, hidden_};
  }

  size_t rows_, hidden_, width_;
  bool with_add_, with_bias_;
  Array x_, add_, norm_, first_, bias_, second_;
  PackedMatrix gate_up_, down_;
  Array packed_first_, packed_second_;
};

template <class T>
void TestType() {
  for (const bool with : {false, true}) {
    for (const size_t hidden : {1, 8, 37, 96}) {
      for (const size_t rows : {0, 1, 3, 17}) Layer<T>(rows, hidden, 2 * hidden + 1, with, !with).Run();
    }
    Layer<T>(200, 48, 50, with, with).Run();
  }
}

}  // namespace

void TestFused() {
  TestType<float>();
  TestType<BFloat16>();
}

}  // namespace dcprt::test
