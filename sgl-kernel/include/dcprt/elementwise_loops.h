// Loops over single rows, included once for each instruction set by elementwise.h, hence without a guard. DCPRT_TARGET
// says what the compiler may use; it finds the vectors itself, since every sum and maximum is held in kLanes lanes.

// Sum of squares of x[count].
template <class X>
DCPRT_TARGET float SquareSum(const X* x, size_t count) {
  float lanes[kLanes] = {};
  const size_t whole = count / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) lanes[j] += Get(x[i + j]) * Get(x[i + j]);
  }
  for (size_t i = whole; i < count; ++i) lanes[i - whole] += Get(x[i]) * Get(x[i]);
  for (size_t width = kLanes / 2; width > 0; width /= 2) {
    for (size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  }
  return lanes[0];
}

// 1 / rms(x)
template <class X>
DCPRT_TARGET float ScaleOf(const X* x, float eps, size_t count) {
  return 1.0f / std::sqrt(SquareSum(x, count) / static_cast<float>(count) + eps);
}

// out = x / rms(x) * weight
template <class X, class W, class O>
DCPRT_TARGET void NormRow(const X* x, const W* weight, float eps, O* out, size_t count) {
  const float scale = ScaleOf(x, eps, count);
  for (size_t i = 0; i < count; ++i) Put(Get(x[i]) * scale * Get(weight[i]), out + i);
}

// x = x / rms(x) * weight
template <class X>
DCPRT_TARGET void NormInPlace(X* __restrict x, const X* __restrict weight, float eps, size_t count) {
  const float scale = ScaleOf(x, eps, count);
  for (size_t i = 0; i < count; ++i) Put(Get(x[i]) * scale * Get(weight[i]), x + i);
}

// x += y
template <class Y>
DCPRT_TARGET void AddRow(float* __restrict x, const Y* __restrict y, size_t count) {
  for (size_t i = 0; i < count; ++i) x[i] += Get(y[i]);
}

// out = gate / (1 + exp(-gate)) * up
template <class X>
DCPRT_TARGET void SiluMulRow(const X* __restrict gate, const X* __restrict up, X* __restrict out, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float x = Get(gate[i]);
    Put(x / (1.0f + Exp(-x)) * Get(up[i]), out + i);
  }
}

// Turns pairs (x[i], x[half + i]) by the angles of cos[half] and sin[half].
template <class X>
DCPRT_TARGET void RotateHead(X* __restrict first, X* __restrict second, const float* __restrict cos,
                             const float* __restrict sin, size_t half) {
  for (size_t i = 0; i < half; ++i) {
    const float a = Get(first[i]), b = Get(second[i]);
    Put(a * cos[i] - b * sin[i], first + i);
    Put(b * cos[i] + a * sin[i], second + i);
  }
}

// Greatest of x[count], or a NaN if one is among them. At least one element.
DCPRT_TARGET inline float MaxOf(const float* x, size_t count) {
  float lanes[kLanes];
  int nan = 0;
  for (size_t j = 0; j < kLanes; ++j) lanes[j] = x[0];
  const size_t whole = count / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes) {
    for (size_t j = 0; j < kLanes; ++j) {
      lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
      nan |= x[i + j] != x[i + j];
    }
  }
  float best = x[0];
  for (size_t j = 0; j < kLanes; ++j) best = lanes[j] > best ? lanes[j] : best;
  for (size_t i = whole; i < count; ++i) {
    best = x[i] > best ? x[i] : best;
    nan |= x[i] != x[i];
  }
  return nan ? std::numeric_limits<float>::quiet_NaN() : best;
}

// out += x * factor
DCPRT_TARGET inline void AddScaledRow(float* __restrict out, const float* __restrict x, float factor, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] += x[i] * factor;
}

// out = exp((x - top) * factor), and 0 where that is below what float32 holds; top is the greatest of x, factor positive.
DCPRT_TARGET inline void WeightsRow(const float* __restrict x, float top, float factor, float* __restrict out,
                                    size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float at = (x[i] - top) * factor;
    out[i] = at < -87.0f ? 0.0f : Exp(at);
  }
}

struct Loops {
  template <class X, class W, class O>
  static void Norm(const X* x, const W* weight, float eps, O* out, size_t count) {
    NormRow(x, weight, eps, out, count);
  }
  template <class X>
  static void Norm(X* x, const X* weight, float eps, size_t count) {
    NormInPlace(x, weight, eps, count);
  }
  template <class Y>
  static void Add(float* x, const Y* y, size_t count) {
    AddRow(x, y, count);
  }
  template <class X>
  static void SiluMul(const X* gate, const X* up, X* out, size_t count) {
    SiluMulRow(gate, up, out, count);
  }
  template <class X>
  static void Rotate(X* x, const float* cos, const float* sin, size_t half) {
    RotateHead(x, x + half, cos, sin, half);
  }
  static void AddScaled(float* out, const float* x, float factor, size_t count) { AddScaledRow(out, x, factor, count); }
  static void Weights(const float* x, float top, float factor, float* out, size_t count) {
    WeightsRow(x, top, factor, out, count);
  }
  static float Max(const float* x, size_t count) { return MaxOf(x, count); }
};
