// What the two namespaces of AVX-512 in linear_isa.h share, included by both, hence without a guard.

struct Base {
  using Sum = __m512;
  static constexpr int kN = 4;

  DCPRT_INLINE static void Clear(Sum* sum) { *sum = _mm512_setzero_ps(); }
  DCPRT_INLINE static __m128 Quarter(__m512 x) {
    const __m256 lower = _mm512_maskz_extractf32x8_ps(0xff, x, 0);
    const __m256 half = _mm256_add_ps(lower, _mm512_maskz_extractf32x8_ps(0xff, x, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  }
  template <int N>
  DCPRT_INLINE static void Total(const Sum* acc, float* out) {
    if (N == 4) {
      const __m128 left = _mm_hadd_ps(Quarter(acc[0]), Quarter(acc[N > 1 ? 1 : 0]));
      const __m128 right = _mm_hadd_ps(Quarter(acc[N > 2 ? 2 : 0]), Quarter(acc[N > 3 ? 3 : 0]));
      _mm_storeu_ps(out, _mm_hadd_ps(left, right));
      return;
    }
    for (int n = 0; n < N; ++n) {
      __m128 sum = Quarter(acc[n]);
      sum = _mm_hadd_ps(sum, sum);
      out[n] = _mm_cvtss_f32(_mm_hadd_ps(sum, sum));
    }
  }
};
