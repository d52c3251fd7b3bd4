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
#include "dcprt/threads.h"

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

  using Counts = std::array<size_t, 256>;

  // Adds the `count` weights of a row.
  static void Count(const BFloat16* row, size_t count, Counts* counts) {
    for (size_t i = 0; i < count; ++i) ++(*counts)[row[i].bits >> 8];
  }

  explicit UpperBytes(const Counts& count) {
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

// Some panels of a matrix while it is coded: where they begin in `out`, and which of their units are kept, both counted
// from the begin of the part.
struct CodedPart {
  size_t first, count;  // panels
  uint8_t* out;
  size_t bytes = 0;
  std::vector<CodePlace> places{};
  std::vector<uint32_t> kept{};

  void Code(const BFloat16* weight, size_t stride, const PackedMatrix& to, const UpperBytes& upper) {
    BFloat16 unit[kUnit];
    for (size_t panel = first; panel < first + count; ++panel) {
      places.push_back({bytes, kept.size() * sizeof(uint32_t)});
      for (size_t u = 0; u < to.Steps() / PackedMatrix::kUnitSteps; ++u) {
        PackSteps(weight, stride, to, panel, u * PackedMatrix::kUnitSteps, PackedMatrix::kUnitSteps, unit);
        if (upper.Code(unit, out + bytes)) {
          bytes += kCodedUnit;
        } else {
          std::memcpy(out + bytes, unit, kKeptUnit);
          bytes += kKeptUnit;
          kept.push_back(static_cast<uint32_t>(u));
        }
      }
      kept.push_back(kNoUnit);
    }
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

// What coding needs: the header, and as much as the plain packed matrix.
inline size_t CodedRoom(const PackedMatrix& m) {
  return sizeof(CodeHeader) + m.Panels() * m.PanelElements() * sizeof(BFloat16);
}

// Codes the matrix [outs, ins], rows `stride` elements apart, into `data`, which is aligned to 8 bytes and has CodedRoom.
// Returns the bytes it takes, or 0 where that would save less than an eighth. The result is the same for any `threads`.
inline size_t CodeMatrix(const BFloat16* weight, size_t stride, const PackedMatrix& to, void* data, int threads) {
  using namespace linear_detail;
  const size_t panels = to.Panels(), panel_bytes = to.PanelElements() * sizeof(BFloat16), plain = panels * panel_bytes;
  const size_t size_of_part = (panels + static_cast<size_t>(threads) - 1) / static_cast<size_t>(threads);
  uint8_t* out = static_cast<uint8_t*>(data);
  std::vector<CodedPart> parts;
  for (size_t panel = 0; panel < panels; panel += size_of_part) {
    parts.push_back({panel, std::min(size_of_part, panels - panel), out + sizeof(CodeHeader) + panel * panel_bytes});
  }
  const auto for_parts = [&](const auto& work) {
    ThreadPool::Get().Run(threads, static_cast<uint32_t>(parts.size()), [&](uint32_t i) { work(i, parts[i]); });
  };
  std::vector<UpperBytes::Counts> counts(parts.size());
  for_parts([&](size_t i, const CodedPart& part) {
    const size_t end = std::min(to.outs, (part.first + part.count) * PackedMatrix::kPanel);
    for (size_t row = part.first * PackedMatrix::kPanel; row < end; ++row) {
      UpperBytes::Count(weight + row * stride, to.ins, &counts[i]);
    }
  });
  UpperBytes::Counts total{};
  for (const auto& count : counts) {
    for (size_t i = 0; i < total.size(); ++i) total[i] += count[i];
  }
  const UpperBytes upper(total);
  for_parts([&](size_t, CodedPart& part) { part.Code(weight, stride, to, upper); });

  size_t at = sizeof(CodeHeader);
  std::vector<CodePlace> places;
  std::vector<uint32_t> kept;
  for (const CodedPart& part : parts) {
    std::memmove(out + at, part.out, part.bytes);
    for (const CodePlace& place : part.places) {
      places.push_back({at + place.units, kept.size() * sizeof(uint32_t) + place.kept});
    }
    kept.insert(kept.end(), part.kept.begin(), part.kept.end());
    at += part.bytes;
  }
  places.push_back({at, kept.size() * sizeof(uint32_t)});
  const size_t lists = at + places.size() * sizeof(CodePlace), size = lists + kept.size() * sizeof(uint32_t);
  if (size > plain - plain / 8) return 0;
  for (CodePlace& place : places) place.kept += lists;
  CodeHeader header{};
  std::copy(upper.upper.begin(), upper.upper.end(), header.upper);
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
