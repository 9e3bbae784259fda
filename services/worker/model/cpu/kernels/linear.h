// y = x W^T over packed weights, with what follows it (bias, scales, residual, gate) done while the sums are in registers.
#pragma once
#include <algorithm>
#include <type_traits>

#include "ahead.h"
#include "team.h"

namespace orca {

// Weights in panels of 32 columns (outputs): [panels][inner / STEP][32][STEP]; int8: [panels][inner / GROUP] of 32 int16
// (minus the group's sum per column), 32 bfloat16 (scale per column) and [GROUP / STEP][32][STEP]. bias: per column or null.
struct Linear {
  const uint8_t* weights;
  const float* bias;
  int64_t columns;  // padded to panels
  int64_t inner;    // padded to STEP or GROUP
};

// The left side: rows of T::Row, `inner` apart. scale: [rows][inner / GROUP], int8 only.
template <class T>
struct Rows {
  typename T::Row::Elem* data;
  float* scale;
  int64_t inner;
  typename T::Row::Elem* row(long r) const { return data + r * inner; }
};

constexpr int MAX_ROWS = 12;  // 24 of the 32 registers hold sums
constexpr long ROWS_PER_TASK = 96;

// int8 keeps two sets of sums in registers.
template <class T>
constexpr long most_rows() {
  return std::is_same_v<T, I8> ? MAX_ROWS / 2 : MAX_ROWS;
}

template <class T>
long panel_bytes(const Linear& linear) {
  if constexpr (std::is_same_v<T, I8>) return linear.inner / I8::GROUP * 128 * (I8::GROUP / I8::STEP + 1);
  return linear.inner / T::STEP * 128;
}

// result[r] = row first + r x the panel. A function of its own, whatever follows: it is what takes long to compile.
template <class T, int ROWS, bool LATER>
__attribute__((noinline)) void panel_sums(const Linear& linear, const Rows<T>& in, long panel, long first, Ahead& ahead,
                                          __m512 (*result)[2]) {
  const long steps = linear.inner / T::STEP, lda = steps * T::WORDS;
  const uint32_t* words = (const uint32_t*)in.row(first);
  __m512 sums[ROWS][2];
  for (int r = 0; r < ROWS; ++r) sums[r][0] = sums[r][1] = _mm512_setzero_ps();
  if constexpr (std::is_same_v<T, I8>) {
    constexpr long group_steps = I8::GROUP / I8::STEP, group_bytes = 128 * (group_steps + 1);
    const long groups = linear.inner / I8::GROUP;
    const uint8_t* weights = linear.weights + panel * groups * group_bytes;
    for (long g = 0; g < groups; ++g, weights += group_bytes, words += group_steps) {
      const __m256i* head = (const __m256i*)weights;
      __m512i acc[ROWS][2];
      for (int z = 0; z < 2; ++z) {
        const __m512i start = _mm512_slli_epi32(_mm512_cvtepi16_epi32(_mm256_loadu_si256(head + z)), 7);
        for (int r = 0; r < ROWS; ++r) acc[r][z] = start;
      }
      multiply<I8, ROWS, 2, LATER>(words, lda, weights + 128, group_steps, acc, LATER ? ahead.next() : Fetch{});
      for (int z = 0; z < 2; ++z) {
        const __m512 scale = from_bf16(_mm256_loadu_si256(head + 2 + z));
        for (int r = 0; r < ROWS; ++r) {
          const __m512 both = _mm512_mul_ps(scale, _mm512_set1_ps(in.scale[(first + r) * groups + g]));
          sums[r][z] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][z]), both, sums[r][z]);
        }
      }
    }
  } else {
    const uint8_t* weights = linear.weights + panel * steps * 128;
    if constexpr (LATER) {
      for (long k = 0; k < steps; k += AHEAD_LINES)
        multiply<T, ROWS, 2, true>(words + k * T::WORDS, lda, weights + k * 128, std::min(AHEAD_LINES, steps - k), sums, ahead.next());
    } else {
      multiply<T, ROWS, 2>(words, lda, weights, steps, sums);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int z = 0; z < 2; ++z) result[r][z] = sums[r][z];
}

// Call f with std::integral_constant<int, rows>; rows is 1 .. MAX_ROWS.
template <class F>
ORCA_INLINE void with_rows(int rows, F&& f) {
  switch (rows) {
#define ORCA_CASE(n) \
  case n:            \
    return f(std::integral_constant<int, n>());
    ORCA_CASE(1) ORCA_CASE(2) ORCA_CASE(3) ORCA_CASE(4) ORCA_CASE(5) ORCA_CASE(6)
    ORCA_CASE(7) ORCA_CASE(8) ORCA_CASE(9) ORCA_CASE(10) ORCA_CASE(11) ORCA_CASE(12)
#undef ORCA_CASE
  }
}

inline long chunks_of(long rows) { return (rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK; }

// out(row, panel, first 16 columns, last 16 columns) for the rows from begin to end and every panel; returns when all are
// done. Crew: who shares the work (Team::Member or Alone).
template <class T, class Crew, class Out>
void apply(Crew& crew, const Linear& linear, const Rows<T>& in, long begin, long end, Ahead& ahead, const Out& out) {
  const long rows = end - begin, chunks = chunks_of(rows);
  crew.each_with_next(linear.columns / PANEL * chunks, [&](long task, long next) {
    const long panel = task / chunks, chunk = task % chunks, next_panel = next / chunks;
    long first = begin + rows * chunk / chunks;
    const long end = begin + rows * (chunk + 1) / chunks;
    const long blocks = (end - first + most_rows<T>() - 1) / most_rows<T>();
    __m512 sums[MAX_ROWS][2], bias[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (linear.bias)
      for (int z = 0; z < 2; ++z) bias[z] = _mm512_loadu_ps(linear.bias + panel * PANEL + z * LANES);
    const bool is_new = next_panel != panel && next_panel < linear.columns / PANEL;
    ahead.aim_weights(is_new ? linear.weights + next_panel * panel_bytes<T>(linear) : nullptr, panel_bytes<T>(linear),
                      (blocks - 1) * (linear.inner / T::STEP / AHEAD_LINES));
    for (long block = 0; block < blocks; ++block) {
      const long left = blocks - block;
      const int count = (int)((end - first + left - 1) / left);
      // The first block of rows waits for the weights themselves.
      with_rows(count, [&](auto n) {
        block > 0 ? panel_sums<T, n.value, true>(linear, in, panel, first, ahead, sums)
              : panel_sums<T, n.value, false>(linear, in, panel, first, ahead, sums);
      });
      for (int r = 0; r < count; ++r, ++first)
        out(first, panel, _mm512_add_ps(sums[r][0], bias[0]), _mm512_add_ps(sums[r][1], bias[1]));
    }
  });
}

// To unsigned int8, each group by its largest magnitude.
ORCA_INLINE void quantise(const float* from, uint8_t* to, float* scale, long count) {
  for (long begin = 0; begin < count; begin += I8::GROUP) {
    __m512 value[I8::GROUP / LANES], largest = _mm512_setzero_ps();
    for (int i = 0; i < I8::GROUP / LANES; ++i) {
      value[i] = _mm512_loadu_ps(from + begin + i * LANES);
      largest = _mm512_max_ps(largest, _mm512_abs_ps(value[i]));
    }
    const float most = _mm512_reduce_max_ps(largest);
    scale[begin / I8::GROUP] = most / 127.0f;
    const __m512 factor = _mm512_set1_ps(most > 0 ? 127.0f / most : 0.0f);
    for (int i = 0; i < I8::GROUP / LANES; ++i) {
      const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(value[i], factor));
      const __m512i shifted = _mm512_add_epi32(rounded, _mm512_set1_epi32(128));
      _mm_storeu_si128((__m128i*)(to + begin + i * LANES), _mm512_cvtepi32_epi8(shifted));
    }
  }
}

}  // namespace orca
