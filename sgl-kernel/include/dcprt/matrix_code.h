// A bfloat16 matrix in about three quarters of its bytes, without loss: what reads it waits for memory, and the weights
// of a model have few different exponents.
//
// Of every weight, the lower byte is kept (the last bit of the exponent, and the mantissa), and of the upper byte (sign
// and exponent) which of the 16 most frequent ones of the matrix it is. Weights come in units: four steps of a panel, in
// their packed order, see linear_types.h. A unit that has any other upper byte is kept as it is.
//
//   CodeHeader
//   units                    of every panel: uint8 [2, 64] lower bytes of each half, uint8 [64] the places of upper bytes,
//                            those of the first half in the lower four bits; or bfloat16 [128]
//   CodePlace [panels + 1]   where the units of a panel begin, and which of them are kept; the last: where both end
//   uint32 []                kept units of every panel, ascending, then kNoUnit
//
// Units begin at a multiple of 64 bytes. `PlaceOf` gives the order inside a half: such that interleaving 16 lower with 16
// upper bytes gives 8 weights of a step and 8 of the next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dcprt/bfloat16.h"
#include "dcprt/linear_types.h"

namespace dcprt {

struct CodeHeader {
  uint8_t upper[16];
  uint64_t outs, ins, bytes;
  uint64_t places;  // where they are, in bytes from the header
  uint64_t unused[2];
};
static_assert(sizeof(CodeHeader) == 64, "what follows is aligned like the header");

// In bytes from the header.
struct CodePlace {
  uint64_t units, kept;
};

namespace linear_detail {

constexpr size_t kUnit = PackedMatrix::kUnitSteps * PackedMatrix::kPanel * 2;  // weights
constexpr size_t kCodedUnit = kUnit + kUnit / 2, kKeptUnit = kUnit * 2;        // bytes
constexpr uint32_t kNoUnit = UINT32_MAX;

// Of weight i of a half: a step holds 32 weights, a vector lane 8 of them.
constexpr size_t PlaceOf(size_t i) { return i % 32 / 8 * 16 + i / 32 * 8 + i % 8; }

// One panel, unit after unit.
class CodedPanel {
 public:
  CodedPanel() = default;
  CodedPanel(const PackedMatrix& m, size_t panel) {
    const uint8_t* data = static_cast<const uint8_t*>(m.data);
    const uint64_t places = static_cast<const CodeHeader*>(m.data)->places;
    const CodePlace* place = reinterpret_cast<const CodePlace*>(data + places) + panel;
    kept_ = reinterpret_cast<const uint32_t*>(data + place[0].kept);
    at_ = data + place[0].units;
    end_ = data + place[1].units;
    size_ = static_cast<size_t>(end_ - at_);
  }

  const uint8_t* at() const { return at_; }
  // What is read `bytes` from here on, where `others` panels as long as this one are read beside it.
  const uint8_t* Ahead(size_t bytes, size_t others) const {
    const size_t left = static_cast<size_t>(end_ - at_);
    return at_ + bytes + (bytes < left ? 0 : others * size_);
  }
  // Whether the unit at `at()` is kept as it is.
  bool kept() const { return *kept_ == unit_; }
  void Next() {
    const bool was = kept();
    at_ += was ? kKeptUnit : kCodedUnit;
    kept_ += was;
    ++unit_;
  }

 private:
  const uint32_t* kept_ = nullptr;  // the next of them
  const uint8_t* at_ = nullptr;
  const uint8_t* end_ = nullptr;
  size_t size_ = 0;
  uint32_t unit_ = 0;
};

inline const uint8_t* UpperOf(const PackedMatrix& m) { return static_cast<const CodeHeader*>(m.data)->upper; }

// Weight i of a unit.
inline BFloat16 WeightOf(const CodedPanel& panel, const uint8_t* upper, size_t i) {
  if (panel.kept()) {
    BFloat16 out;
    std::memcpy(&out, panel.at() + i * sizeof(out), sizeof(out));
    return out;
  }
  const size_t half = i / 64, place = PlaceOf(i % 64);
  const int code = panel.at()[kUnit + place] >> (half * 4) & 15;
  const uint16_t bits = static_cast<uint16_t>(upper[code] << 8 | panel.at()[half * 64 + place]);
  return BFloat16{bits};
}

}  // namespace linear_detail
}  // namespace dcprt
