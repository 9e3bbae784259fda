// Number formats: how a 4-byte word of a row meets a 64-byte register of 16 columns.
//
// In every format a register of packed weights holds 16 columns x STEP consecutive inner elements, and a row gives a
// 4-byte word of STEP elements: one float, two bfloat16 or four int8. So one loop serves all of them, and each output
// is one chain of sums in the order of the inner dimension: its bits do not depend on the number of rows.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define ORCA_INLINE inline __attribute__((always_inline))

namespace orca {

constexpr int LANES = 16;  // columns of a register
constexpr int PANEL = 32;  // columns of a panel of packed weights: two registers

ORCA_INLINE __m512 from_bf16(__m256i value) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(value), 16));
}

struct F32 {
  using Elem = float;
  using Acc = __m512;
  static constexpr int STEP = 1;
  static ORCA_INLINE Acc zero() { return _mm512_setzero_ps(); }
  static ORCA_INLINE Acc dot(Acc acc, __m512i word, __m512i weights) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(word), _mm512_castsi512_ps(weights), acc);
  }
  static ORCA_INLINE __m512 load(const Elem* from) { return _mm512_loadu_ps(from); }
  static ORCA_INLINE void store(Elem* to, __m512 value) { _mm512_storeu_ps(to, value); }
  static ORCA_INLINE Elem one(float value) { return value; }
};

struct BF16 {
  using Elem = uint16_t;
  using Acc = __m512;
  static constexpr int STEP = 2;
  static ORCA_INLINE Acc zero() { return _mm512_setzero_ps(); }
  static ORCA_INLINE Acc dot(Acc acc, __m512i word, __m512i weights) {
    return _mm512_dpbf16_ps(acc, (__m512bh)word, (__m512bh)weights);
  }
  static ORCA_INLINE __m512 load(const Elem* from) { return from_bf16(_mm256_loadu_si256((const __m256i*)from)); }
  static ORCA_INLINE void store(Elem* to, __m512 value) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value));
  }
};

// Rows are unsigned (value + 128), weights signed; the sum that the 128 adds is known per column and taken off. Every
// GROUP inner elements have scales of their own, for the row and for the column.
struct I8 {
  using Elem = uint8_t;
  using Acc = __m512i;
  static constexpr int STEP = 4, GROUP = 64;
  static ORCA_INLINE Acc zero() { return _mm512_setzero_si512(); }
  static ORCA_INLINE Acc dot(Acc acc, __m512i word, __m512i weights) { return _mm512_dpbusd_epi32(acc, word, weights); }
};

// 2^x for x <= 0 or not far above; within two units of the last place of T's kind of attention weight.
template <class T>
ORCA_INLINE __m512 exp2_512(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
  const auto c = [](float value) { return _mm512_set1_ps(value); };
  __m512 p;
  if constexpr (T::STEP == 1) {
    p = _mm512_fmadd_ps(c(1.520192166e-5f), f, c(1.546929114e-4f));
    p = _mm512_fmadd_ps(p, f, c(1.333392256e-3f));
    p = _mm512_fmadd_ps(p, f, c(9.618027254e-3f));
    p = _mm512_fmadd_ps(p, f, c(5.550410353e-2f));
    p = _mm512_fmadd_ps(p, f, c(2.40226512e-1f));
    p = _mm512_fmadd_ps(p, f, c(6.931471807e-1f));
    p = _mm512_fmadd_ps(p, f, c(1.0f));
  } else {  // relative error 3e-6, of which bfloat16 keeps nothing
    p = _mm512_fmadd_ps(c(9.570101792e-3f), f, c(5.591786031e-2f));
    p = _mm512_fmadd_ps(p, f, c(2.402474483e-1f));
    p = _mm512_fmadd_ps(p, f, c(6.931218147e-1f));
    p = _mm512_fmadd_ps(p, f, c(9.999992614e-1f));
  }
  return _mm512_scalef_ps(p, n);
}

ORCA_INLINE __m512 silu512(__m512 x) {
  // Beyond 2^100 the quotient is as good as zero.
  const __m512 power = _mm512_min_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)), _mm512_set1_ps(100.0f));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_512<F32>(power)));
}

// acc[r][z] += row r of `a` x register z of the panel, for `steps` words. lda: words from one row to the next.
// ahead: if not null, where a line is fetched from with each word.
template <class T, int ROWS, int REGS>
ORCA_INLINE void multiply(const uint32_t* a, ptrdiff_t lda, const uint8_t* weights, long steps,
                          typename T::Acc (&acc)[ROWS][REGS], const char* ahead = nullptr) {
  for (long k = 0; k < steps; ++k, weights += 64 * REGS) {
    if (ahead) _mm_prefetch(ahead + 64 * k, _MM_HINT_T1);
    __m512i column[REGS];
#pragma GCC unroll 4
    for (int z = 0; z < REGS; ++z) column[z] = _mm512_loadu_si512(weights + 64 * z);
#pragma GCC unroll 4
    for (int z = 0; z < REGS; ++z) _mm_prefetch((const char*)weights + 2048 + 64 * z, _MM_HINT_NTA);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const __m512i word = _mm512_set1_epi32((int)a[r * lda + k]);
#pragma GCC unroll 4
      for (int z = 0; z < REGS; ++z) acc[r][z] = T::dot(acc[r][z], word, column[z]);
    }
  }
}

}  // namespace orca
