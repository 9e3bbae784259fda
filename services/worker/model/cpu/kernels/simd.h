// Number formats: how a 4-byte word of a row meets a 64-byte register of 16 columns.
//
// In every format a register of packed weights holds 16 columns x STEP consecutive inner elements, and a row gives a
// 4-byte word (or two) of STEP elements: one float, two bfloat16 or four int8. So one loop serves all of them, and each output
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

// Numbers in memory, 16 of which are a register of floats.
struct Single {
  using Elem = float;
  static ORCA_INLINE __m512 load(const Elem* from) { return _mm512_loadu_ps(from); }
  static ORCA_INLINE void store(Elem* to, __m512 value) { _mm512_storeu_ps(to, value); }
};

struct Half {  // bfloat16
  using Elem = uint16_t;
  static ORCA_INLINE __m512 load(const Elem* from) { return from_bf16(_mm256_loadu_si256((const __m256i*)from)); }
  static ORCA_INLINE void store(Elem* to, __m512 value) {
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value));
  }
};

// Row: what rows are made of; Kept: what weights and caches are. WORDS: of a row for STEP inner elements.
struct F32 {
  using Row = Single;
  using Kept = Single;
  using Acc = __m512;
  using Word = __m512;
  using Column = __m512;
  static constexpr int STEP = 1, WORDS = 1;
  static ORCA_INLINE Acc zero() { return _mm512_setzero_ps(); }
  static ORCA_INLINE Word word(const uint32_t* at) { return _mm512_castsi512_ps(_mm512_set1_epi32((int)*at)); }
  static ORCA_INLINE Column column(__m512i weights) { return _mm512_castsi512_ps(weights); }
  static ORCA_INLINE Acc dot(Acc acc, Word word, Column column) { return _mm512_fmadd_ps(word, column, acc); }
};

struct BF16 {
  using Row = Half;
  using Kept = Half;
  using Acc = __m512;
  using Word = __m512bh;
  using Column = __m512bh;
  static constexpr int STEP = 2, WORDS = 1;
  static ORCA_INLINE Acc zero() { return _mm512_setzero_ps(); }
  static ORCA_INLINE Word word(const uint32_t* at) { return (Word)_mm512_set1_epi32((int)*at); }
  static ORCA_INLINE Column column(__m512i weights) { return (Column)weights; }
  static ORCA_INLINE Acc dot(Acc acc, Word word, Column column) { return _mm512_dpbf16_ps(acc, word, column); }
};

// The same weights, by products of floats: where a processor takes four times as long for one of bfloat16 as for one of
// those, which do half as much. Rows are not rounded.
struct WideBF16 {
  using Row = Single;
  using Kept = Half;
  using Acc = __m512;
  struct Pair {
    __m512 even, odd;
  };
  using Word = Pair;
  using Column = Pair;
  static constexpr int STEP = 2, WORDS = 2;
  static ORCA_INLINE Acc zero() { return _mm512_setzero_ps(); }
  static ORCA_INLINE Word word(const uint32_t* at) { return {F32::word(at), F32::word(at + 1)}; }
  static ORCA_INLINE Column column(__m512i weights) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(weights, _mm512_set1_epi32((int)0xffff0000)))};
  }
  static ORCA_INLINE Acc dot(Acc acc, const Word& word, const Column& column) {
    return _mm512_fmadd_ps(word.odd, column.odd, _mm512_fmadd_ps(word.even, column.even, acc));
  }
};

// Rows are unsigned (value + 128), weights signed; the sum that the 128 adds is known per column and taken off. Every
// GROUP inner elements have scales of their own, for the row and for the column.
struct I8 {
  struct Row {
    using Elem = uint8_t;
  };
  using Acc = __m512i;
  using Word = __m512i;
  using Column = __m512i;
  static constexpr int STEP = 4, WORDS = 1, GROUP = 64;
  static ORCA_INLINE Acc zero() { return _mm512_setzero_si512(); }
  static ORCA_INLINE Word word(const uint32_t* at) { return _mm512_set1_epi32((int)*at); }
  static ORCA_INLINE Column column(__m512i weights) { return weights; }
  static ORCA_INLINE Acc dot(Acc acc, Word word, Column column) {
    asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(word), "v"(column));  // the intrinsic copies acc back and forth (GCC 12)
    return acc;
  }
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

// Weights pass by the caches on AMD's processors, which leaves these to others; on Intel's they would come at half the
// speed. Measured on Zen 4 and Emerald Rapids, as all that depends on this.
inline const bool on_intel = __builtin_cpu_is("intel");

// Where lines are fetched from, one with each step, beside the product's own.
struct Fetch {
  const char *weights, *cache;
};

// acc[r][z] += row r of `a` x register z of the panel, for `steps` steps. lda: words from one row to the next. LATER: the
// panel is in the caches, and what is in `fetch` shall come there.
template <class T, int ROWS, int REGS, bool LATER = false>
ORCA_INLINE void multiply(const uint32_t* a, ptrdiff_t lda, const uint8_t* weights, long steps,
                          typename T::Acc (&acc)[ROWS][REGS], Fetch fetch = {}) {
  typename T::Acc sum[ROWS][REGS];  // a fetch makes the compiler write down whatever others could see
  for (int r = 0; r < ROWS; ++r)
    for (int z = 0; z < REGS; ++z) sum[r][z] = acc[r][z];
  for (long k = 0; k < steps; ++k, weights += 64 * REGS) {
    typename T::Column column[REGS];
#pragma GCC unroll 4
    for (int z = 0; z < REGS; ++z) column[z] = T::column(_mm512_loadu_si512(weights + 64 * z));
#pragma GCC unroll 4
    for (int z = 0; z < REGS; ++z) {
      if (!on_intel) {
        _mm_prefetch((const char*)weights + 2048 + 64 * z, _MM_HINT_NTA);
      } else if (!LATER) {
        _mm_prefetch((const char*)weights + 2048 + 64 * z, _MM_HINT_T0);
      }
    }
    if constexpr (LATER) {
      _mm_prefetch(fetch.cache + 64 * k, _MM_HINT_T1);
      if (on_intel) _mm_prefetch(fetch.weights + 64 * k, _MM_HINT_T1);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const typename T::Word word = T::word(a + r * lda + k * T::WORDS);
#pragma GCC unroll 4
      for (int z = 0; z < REGS; ++z) sum[r][z] = T::dot(sum[r][z], word, column[z]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int z = 0; z < REGS; ++z) acc[r][z] = sum[r][z];
}

}  // namespace orca
