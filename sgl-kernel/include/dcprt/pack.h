// Matrices in the order that products read them: packing, coding, and rows of packed ones.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "dcprt/bfloat16.h"
#include "dcprt/linear_types.h"
#include "dcprt/matrix_code.h"

namespace dcprt {
namespace linear_detail {

inline float At(const void* x, FloatType type, size_t i) {
  return type == FloatType::kFloat32 ? static_cast<const float*>(x)[i] : ToFloat(static_cast<const BFloat16*>(x)[i]);
}

// Steps [first, first + count) of a panel, to `data`, from a matrix whose rows are `stride` elements apart.
template <class T>
void PackSteps(const T* weight, size_t stride, const PackedMatrix& to, size_t panel, size_t first, size_t count, T* data) {
  constexpr size_t kBytes = 4;  // inputs of a step, whatever their type
  const size_t width = to.Width(), end = first + count, row = panel * PackedMatrix::kPanel;
  size_t step = first;
  if (row + PackedMatrix::kPanel <= to.outs) {
    for (; step < std::min(end, to.ins / width); ++step) {
      for (size_t lane = 0; lane < PackedMatrix::kPanel; ++lane, data += width) {
        std::memcpy(data, weight + (row + lane) * stride + step * width, kBytes);
      }
    }
  }
  for (; step < end; ++step) {
    for (size_t lane = 0; lane < PackedMatrix::kPanel; ++lane) {
      for (size_t i = 0; i < width; ++i, ++data) {
        const size_t out = row + lane, in = step * width + i;
        *data = out < to.outs && in < to.ins ? weight[out * stride + in] : T{};
      }
    }
  }
}

template <class T>
void Pack(const T* weight, size_t stride, const PackedMatrix& to, T* data) {
  for (size_t panel = 0; panel < to.Panels(); ++panel) {
    PackSteps(weight, stride, to, panel, 0, to.Steps(), data + panel * to.PanelElements());
  }
}

// The most frequent upper bytes, and the place of every byte among them; 16: none.
struct UpperBytes {
  std::array<uint8_t, 16> upper{};
  std::array<uint8_t, 256> place{};

  UpperBytes(const BFloat16* weight, size_t stride, size_t outs, size_t ins) {
    std::array<size_t, 256> count{};
    for (size_t out = 0; out < outs; ++out) {
      for (size_t in = 0; in < ins; ++in) ++count[weight[out * stride + in].bits >> 8];
    }
    std::array<uint8_t, 256> order;
    std::iota(order.begin(), order.end(), uint8_t{0});
    std::stable_sort(order.begin(), order.end(), [&](uint8_t a, uint8_t b) { return count[a] > count[b]; });
    place.fill(16);
    for (uint8_t i = 0; i < 16; ++i) place[upper[i] = order[i]] = i;
  }

  // Whether the unit could be coded; then kCodedUnit bytes are written.
  bool Code(const BFloat16* unit, uint8_t* to) const {
    uint8_t any = 0;
    std::memset(to + kUnit, 0, kUnit / 2);
    for (size_t i = 0; i < kUnit; ++i) {
      const size_t half = i / 64, at = PlaceOf(i % 64);
      const uint8_t code = place[unit[i].bits >> 8];
      any |= code;
      to[half * 64 + at] = static_cast<uint8_t>(unit[i].bits);
      to[kUnit + at] |= static_cast<uint8_t>(code << (half * 4));
    }
    return any < 16;
  }
};

inline void PlainRow(const PackedMatrix& m, size_t row, float* out) {
  const size_t width = m.Width(), panel = row / PackedMatrix::kPanel, lane = row % PackedMatrix::kPanel;
  const size_t base = panel * m.PanelElements() + lane * width;
  for (size_t i = 0; i < m.ins; ++i) out[i] = At(m.data, m.type, base + i / width * PackedMatrix::kPanel * width + i % width);
}

inline void CodedRow(const PackedMatrix& m, size_t row, float* out) {
  constexpr size_t kIns = PackedMatrix::kUnitSteps * 2;  // of a unit
  const uint8_t* upper = UpperOf(m);
  CodedPanel panel(m, row / PackedMatrix::kPanel);
  for (size_t first = 0; first < m.ins; first += kIns, panel.Next()) {
    for (size_t i = 0; i < std::min(kIns, m.ins - first); ++i) {
      const size_t at = (i / 2 * PackedMatrix::kPanel + row % PackedMatrix::kPanel) * 2 + i % 2;
      out[first + i] = ToFloat(WeightOf(panel, upper, at));
    }
  }
}

}  // namespace linear_detail

// data: room for Panels() * PanelElements() elements of the type of `to`. weight: [outs, ins] in the same type.
inline void PackMatrix(const void* weight, size_t stride, const PackedMatrix& to, void* data) {
  if (to.type == FloatType::kFloat32) {
    linear_detail::Pack(static_cast<const float*>(weight), stride, to, static_cast<float*>(data));
  } else {
    linear_detail::Pack(static_cast<const BFloat16*>(weight), stride, to, static_cast<BFloat16*>(data));
  }
}

// Codes the matrix [outs, ins], rows `stride` elements apart, into `data`, which is aligned to 8 bytes and has room for the
// plain packed one. Returns the bytes it takes, or 0 where that would save less than an eighth.
inline size_t CodeMatrix(const BFloat16* weight, size_t stride, const PackedMatrix& to, void* data) {
  using namespace linear_detail;
  constexpr size_t kSteps = PackedMatrix::kUnitSteps;
  const size_t panels = to.Panels(), plain = panels * to.PanelElements() * sizeof(BFloat16);
  const UpperBytes bytes(weight, stride, to.outs, to.ins);
  std::vector<CodePlace> places;
  std::vector<uint32_t> kept;
  BFloat16 unit[kUnit];
  uint8_t* out = static_cast<uint8_t*>(data);
  size_t at = sizeof(CodeHeader);
  for (size_t panel = 0; panel < panels; ++panel) {
    places.push_back({at, kept.size() * sizeof(uint32_t)});
    for (size_t u = 0; u < to.Steps() / kSteps; ++u) {
      if (at + kKeptUnit > plain) return 0;
      PackSteps(weight, stride, to, panel, u * kSteps, kSteps, unit);
      if (bytes.Code(unit, out + at)) {
        at += kCodedUnit;
      } else {
        std::memcpy(out + at, unit, kKeptUnit);
        at += kKeptUnit;
        kept.push_back(static_cast<uint32_t>(u));
      }
    }
    kept.push_back(kNoUnit);
  }
  places.push_back({at, kept.size() * sizeof(uint32_t)});
  const size_t lists = at + places.size() * sizeof(CodePlace), size = lists + kept.size() * sizeof(uint32_t);
  if (size > plain - plain / 8) return 0;
  for (CodePlace& place : places) place.kept += lists;
  CodeHeader header{};
  std::copy(bytes.upper.begin(), bytes.upper.end(), header.upper);
  header.outs = to.outs, header.ins = to.ins, header.bytes = size, header.places = at;
  std::memcpy(out, &header, sizeof(header));
  std::memcpy(out + at, places.data(), places.size() * sizeof(CodePlace));
  std::memcpy(out + lists, kept.data(), kept.size() * sizeof(uint32_t));
  return size;
}

// out float32 [count, ins]: rows of the matrix, each an output of it; zeros where `rows` is outside of [0, outs).
inline void PackedRows(const PackedMatrix& m, const int64_t* rows, size_t count, float* out) {
  for (size_t r = 0; r < count; ++r, out += m.ins) {
    if (rows[r] < 0 || static_cast<size_t>(rows[r]) >= m.outs) {
      std::fill(out, out + m.ins, 0.0f);
    } else if (m.coded) {
      linear_detail::CodedRow(m, static_cast<size_t>(rows[r]), out);
    } else {
      linear_detail::PlainRow(m, static_cast<size_t>(rows[r]), out);
    }
  }
}

}  // namespace dcprt
