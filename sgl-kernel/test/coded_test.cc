// Products with a coded matrix against those with the packed one: the same bits. Memory ends where the code does.
#include <cstring>
#include <memory>

#include "dcprt/linear.h"
#include "harness.h"

namespace dcprt::test {
namespace {

// The code of a matrix in memory of exactly its size; `bytes` is 0 where coding does not pay.
struct Coded {
  std::unique_ptr<char[]> data;
  size_t bytes;
  PackedMatrix matrix;

  Coded(const Array& weight, size_t outs, size_t ins, int threads = 1)
      : bytes(0), matrix{nullptr, FloatType::kBFloat16, outs, ins, true} {
    const std::unique_ptr<char[]> made(new char[CodedRoom(matrix)]);
    bytes = CodeMatrix(weight.as<BFloat16>(), ins, matrix, made.get(), threads);
    data.reset(new char[bytes]);
    std::memcpy(data.get(), made.get(), bytes);
    matrix.data = data.get();
  }
};

Array Weights(size_t outs, size_t ins, double odd) {
  Array weight(outs * ins, true);
  Random random(outs + ins);
  for (size_t i = 0; i < weight.size(); ++i) {
    const double x = random.Next();
    weight.Set(i, (x < 0 ? -1 : 1) * (0.01 + 0.1 * x * x));
  }
  // Units that are kept: the first and the last one, and some of both kinds side by side.
  for (size_t i = 0; i < weight.size(); i += 991) weight.Set(i, odd);
  weight.Set(weight.size() - 1, odd);
  return weight;
}

Array Product(const PackedMatrix& matrix, const Array& x, size_t rows, Isa isa, int threads) {
  Array out(rows * matrix.outs);
  LinearArgs args{};
  args.x = x.data();
  args.x_type = x.narrow() ? FloatType::kBFloat16 : FloatType::kFloat32;
  args.x_stride = matrix.ins;
  args.matrix = matrix;
  args.out = out.data();
  args.out_type = FloatType::kFloat32;
  args.rows = rows;
  args.out_stride = matrix.outs;
  Linear(args, isa, threads);
  return out;
}

void Check(size_t rows, size_t ins, size_t outs, double odd) {
  const Array weight = Weights(outs, ins, odd);
  PackedMatrix plain{nullptr, FloatType::kBFloat16, outs, ins};
  Array packed(plain.Panels() * plain.PanelElements(), true);
  PackMatrix(weight.data(), ins, plain, packed.data());
  plain.data = packed.data();
  const Coded coded(weight, outs, ins);
  Expect(coded.bytes > 0, Label("coded", ins, outs));
  if (coded.bytes == 0) return;
  for (const int threads : {2, 3, 7, 64}) {
    const Coded other(weight, outs, ins, threads);
    Expect(other.bytes == coded.bytes && std::memcmp(other.data.get(), coded.data.get(), coded.bytes) == 0,
           Label("coded by threads", ins, outs, threads));
  }
  for (const bool narrow : {false, true}) {
    Array x(rows * ins, narrow);
    Random(rows).Fill(x);
    for (const Isa isa : Isas()) {
      for (const int threads : {1, 2}) {
        const Array one = Product(plain, x, rows, isa, threads), other = Product(coded.matrix, x, rows, isa, threads);
        Expect(std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0,
               Label("coded", rows, ins, outs, narrow, threads) + " " + NameOf(isa));
      }
    }
  }
  std::vector<int64_t> rows_of{-1, static_cast<int64_t>(outs), 0, static_cast<int64_t>(outs) - 1, 5};
  Array one(rows_of.size() * ins), other(rows_of.size() * ins);
  PackedRows(plain, rows_of.data(), rows_of.size(), one.as<float>());
  PackedRows(coded.matrix, rows_of.data(), rows_of.size(), other.as<float>());
  Expect(std::memcmp(one.data(), other.data(), one.size() * sizeof(float)) == 0, Label("coded rows", ins, outs));
}

}  // namespace

void TestCoded() {
  for (const double odd : {0.05, 0.0, -1e30, kInfinity}) {
    for (const size_t ins : {96, 97, 127, 320}) {
      for (const size_t outs : {160, 171, 330}) {
        for (const size_t rows : {1, 3, 8, 9, 20}) Check(rows, ins, outs, odd);
      }
    }
  }
  Array small(1, true);
  small.Fill(1);
  Expect(Coded(small, 1, 1).bytes == 0, "one weight is not coded");
}

}  // namespace dcprt::test
