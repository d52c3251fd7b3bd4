// What the drivers of the kernels share: memory without room to spare, numbers, and a count of what is wrong.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "dcprt/bfloat16.h"
#include "dcprt/isa.h"

namespace dcprt::test {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Elements on the heap: AddressSanitizer sees the first byte behind the last one. They begin `shift` elements behind an
// aligned address, and hold NaN.
class Array {
 public:
  explicit Array(size_t count, bool narrow = false, size_t shift = 0)
      : count_(count), narrow_(narrow), memory_(new char[(count + shift) * Width()]), data_(memory_.get()) {
    std::memset(data_, 0xff, (count + shift) * Width());
    data_ += shift * Width();
  }

  size_t size() const { return count_; }
  bool narrow() const { return narrow_; }  // bfloat16, else float32
  char* data() const { return data_; }
  template <class T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }

  double operator[](size_t i) const { return narrow_ ? ToFloat(as<BFloat16>()[i]) : as<float>()[i]; }
  void Set(size_t i, double value) {
    if (narrow_) {
      as<BFloat16>()[i] = ToBFloat16(static_cast<float>(value));
    } else {
      as<float>()[i] = static_cast<float>(value);
    }
  }
  void Fill(double value) {
    for (size_t i = 0; i < count_; ++i) Set(i, value);
  }

 private:
  size_t Width() const { return narrow_ ? sizeof(BFloat16) : sizeof(float); }

  size_t count_;
  bool narrow_;
  std::unique_ptr<char[]> memory_;
  char* data_;
};

// Numbers between -1 and 1, the same in every run (xorshift).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2 + 1) {
    for (int i = 0; i < 8; ++i) Bits();
  }

  uint64_t Bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  double Next() { return static_cast<double>(Bits() >> 11) / (1ull << 52) - 1; }
  void Fill(Array& x, double size = 1) {
    for (size_t i = 0; i < x.size(); ++i) x.Set(i, size * Next());
  }

 private:
  uint64_t state_;
};

// The instruction sets to be run; main.cc decides.
inline std::vector<Isa>& Isas() {
  static std::vector<Isa> isas;
  return isas;
}

struct Tally {
  long checked = 0, wrong = 0;

  static Tally& Get() {
    static Tally tally;
    return tally;
  }
};

// One statement that has to hold; `where` says what was run.
inline void Expect(bool ok, const std::string& where) {
  constexpr long kShown = 20;
  Tally& tally = Tally::Get();
  ++tally.checked;
  if (!ok && ++tally.wrong <= kShown) std::fprintf(stderr, "wrong: %s\n", where.c_str());
}

// A value and how far from it a result may lie. NaN stands for NaN.
struct Value {
  double value, bound;

  bool Holds(double found) const {
    if (std::isnan(value) || std::isnan(found)) return std::isnan(value) && std::isnan(found);
    return found == value || std::fabs(found - value) <= bound;
  }
};

inline void ExpectValues(const Array& found, const std::vector<Value>& expected, const std::string& where) {
  Expect(found.size() == expected.size(), where + ": size");
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].Holds(found[i])) continue;
    char text[120];
    std::snprintf(text, sizeof(text), ": element %zu is %.9g, not %.9g +- %.2g", i, found[i], expected[i].value,
                  expected[i].bound);
    return Expect(false, where + text);
  }
}

// "name 3 5 ..." for messages.
template <class... Numbers>
std::string Label(const char* name, Numbers... numbers) {
  std::string text = name;
  ((text += " " + std::to_string(numbers)), ...);
  return text;
}

// The families that main.cc runs.
void TestAttention();
void TestCoded();
void TestElementwise();
void TestFork();
void TestFused();
void TestLayer();
void TestLinear();
void TestMerge();
void TestPages();
void TestSampling();
void TestShm();
void TestThreads();

}  // namespace dcprt::test
