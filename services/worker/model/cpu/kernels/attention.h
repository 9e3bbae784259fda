// Causal attention over paged KV (PagedAttention, SOSP'23, section 4), each key and value read once per tile of rows.
//
// A block's keys are kept as weights of a product: per 16 positions [head_dim / STEP][16 positions][STEP]; its values as
// per 32 dimensions [16 positions / STEP][32][STEP]. So scores and sums are the same inner loop as the linear layers'.
// A row is computed in the same order whatever tile it is in.
#pragma once
#include <algorithm>
#include <vector>

#include "linear.h"

namespace orca {

// A layer's cache: [blocks][kv_heads][head_dim x block_size] elements for keys, the same for values.
template <class T>
struct Cache {
  typename T::Kept::Elem* keys;
  typename T::Kept::Elem* values;
  int64_t kv_heads, head_dim, block_size;

  // The 16 positions that begin at `position`, of a sequence with this block table.
  size_t group(const int32_t* table, long position, long head) const {
    const long block = table[position / block_size], within = position % block_size / LANES;
    return ((block * kv_heads + head) * (block_size / LANES) + within) * head_dim * LANES;
  }
};

// Write one position; the first of 16 clears all of them, so that what a block held before is never met.
template <class T>
void remember(const Cache<T>& cache, const int32_t* table, long position, long head, const typename T::Kept::Elem* key,
              const typename T::Kept::Elem* value) {
  const size_t group = cache.group(table, position, head);
  const long slot = position % LANES, dim = cache.head_dim;
  typename T::Kept::Elem *keys = cache.keys + group, *values = cache.values + group;
  if (slot == 0) {
    memset(keys, 0, dim * LANES * sizeof(*keys));
    memset(values, 0, dim * LANES * sizeof(*values));
  }
  uint32_t* key_words = (uint32_t*)keys + slot;
  for (long w = 0; w < dim / T::STEP; ++w) memcpy(&key_words[w * LANES], key + w * T::STEP, 4);
  for (long d = 0; d < dim; d += LANES) {
    uint32_t* words = (uint32_t*)values + d / PANEL * PANEL * (LANES / T::STEP) + slot / T::STEP * PANEL + d % PANEL;
    __m512i word;
    if constexpr (T::STEP == 1) {
      word = _mm512_loadu_si512(value + d);
    } else {  // a word holds this position and the one before or after, which is written later
      word = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(value + d)));
      if (slot % 2) word = _mm512_or_si512(_mm512_slli_epi32(word, 16), _mm512_and_si512(_mm512_loadu_si512(words), _mm512_set1_epi32(0xffff)));
    }
    _mm512_storeu_si512(words, word);
  }
}

// Rows of one sequence and one key head: `count` of the (position, query head) pairs from `first` on.
struct Tile {
  int32_t span, head, first, count;
  int32_t groups;  // of 16 positions that the last row sees
};

struct Span {
  int32_t start, length, context, table;  // table: where its block ids begin
};

template <class T>
class Scratch {
 public:
  void reserve(long positions, long head_dim) {
    scores_.resize(MAX_ROWS * positions);
    weights_.resize(MAX_ROWS * positions);
    query_.resize(MAX_ROWS * head_dim);
  }
  float* scores() { return scores_.data(); }
  typename T::Row::Elem* weights() { return weights_.data(); }
  typename T::Row::Elem* query() { return query_.data(); }

 private:
  std::vector<float> scores_;
  std::vector<typename T::Row::Elem> weights_, query_;
};

// GROUPS groups of 16 keys at once, of all `groups`: enough chains of sums to hide the latency of one.
template <class T, int ROWS, int GROUPS>
ORCA_INLINE void score(const Cache<T>& cache, const int32_t* table, long head, long first, long groups,
                       const typename T::Row::Elem* query, float* scores, long width) {
  const long steps = cache.head_dim / T::STEP;
  const uint8_t* keys[GROUPS];
  const char *values[GROUPS], *next[GROUPS];  // what is wanted next: the values of these keys, and the keys after them
  for (int g = 0; g < GROUPS; ++g) {
    const size_t group = cache.group(table, (first + g) * LANES, head);
    keys[g] = (const uint8_t*)(cache.keys + group);
    values[g] = (const char*)(cache.values + group);
    next[g] = first + g + GROUPS < groups ? (const char*)(cache.keys + cache.group(table, (first + g + GROUPS) * LANES, head)) : values[g];
  }
  typename T::Acc acc[ROWS][GROUPS];
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < GROUPS; ++g) acc[r][g] = T::zero();
  const uint32_t* words = (const uint32_t*)query;
  for (long k = 0; k < steps; ++k) {
    typename T::Column column[GROUPS];
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) {
      _mm_prefetch(values[g] + 64 * k, _MM_HINT_T1);
      _mm_prefetch(next[g] + 64 * k, _MM_HINT_T0);
    }
#pragma GCC unroll 4
    for (int g = 0; g < GROUPS; ++g) column[g] = T::column(_mm512_loadu_si512(keys[g] + 64 * k));
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const typename T::Word word = T::word(words + (r * steps + k) * T::WORDS);
#pragma GCC unroll 4
      for (int g = 0; g < GROUPS; ++g) acc[r][g] = T::dot(acc[r][g], word, column[g]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int g = 0; g < GROUPS; ++g) _mm512_storeu_ps(scores + r * width + (first + g) * LANES, acc[r][g]);
}

// Scores (powers of two) of the first `visible` keys to weights that sum to the returned value; the rest of `width` is zero.
template <class T>
float soften(const float* scores, typename T::Row::Elem* weights, long visible, long width) {
  const __m512 lowest = _mm512_set1_ps(-INFINITY);
  const long full = visible / LANES * LANES;
  const __mmask16 last = (__mmask16)((1u << (visible - full)) - 1);
  const __m512 tail = _mm512_mask_loadu_ps(lowest, last, scores + full);
  __m512 largest = tail;
  for (long i = 0; i < full; i += LANES) largest = _mm512_max_ps(largest, _mm512_loadu_ps(scores + i));
  const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  __m512 sum = _mm512_setzero_ps();
  const auto weigh = [&](long i, __m512 weight) {
    T::Row::store(weights + i, weight);
    sum = _mm512_add_ps(sum, T::Row::load(weights + i));  // as rounded, so that they sum to one
  };
  for (long i = 0; i < full; i += LANES)
    weigh(i, exp2_512<T>(_mm512_sub_ps(_mm512_loadu_ps(scores + i), most)));
  if (last) weigh(full, _mm512_maskz_mov_ps(last, exp2_512<T>(_mm512_sub_ps(_mm512_loadu_ps(scores + full), most))));
  for (long i = full + (last ? LANES : 0); i < width; i += LANES) T::Row::store(weights + i, _mm512_setzero_ps());
  return _mm512_reduce_add_ps(sum);
}

// The first keys of what is attended next, fetched line by line while this one's values are summed.
template <class T>
class Upcoming {
 public:
  void aim(const Cache<T>& cache, const int32_t* table, long head, long groups) {
    count_ = std::min(groups, MOST);
    for (long g = 0; g < count_; ++g) keys_[g] = (const char*)(cache.keys + cache.group(table, g * LANES, head));
    lines_ = cache.head_dim * LANES * sizeof(typename T::Kept::Elem) / 64;
    next_ = 0;
  }
  // `lines` more; when there are none, what was last fetched.
  const char* next(long lines) {
    const char* at = next_ < count_ * lines_ ? keys_[next_ / lines_] + next_ % lines_ * 64 : last_;
    next_ += lines;
    return last_ = at;
  }

 private:
  static constexpr long MOST = 4;  // as many groups as are scored together
  const char *keys_[MOST], *last_ = nullptr;
  long count_, lines_, next_;
};

template <class T, int ROWS, class Out>
void attend(const Cache<T>& cache, const int32_t* table, long head, long groups, const long* visible, Scratch<T>& scratch,
            Upcoming<T>& upcoming, const Out& out) {
  const long width = groups * LANES, dim = cache.head_dim;
  constexpr int TOGETHER = ROWS <= 3 ? 4 : ROWS <= 6 ? 2 : 1;
  long g = 0;
  for (; g + TOGETHER <= groups; g += TOGETHER)
    score<T, ROWS, TOGETHER>(cache, table, head, g, groups, scratch.query(), scratch.scores(), width);
  for (; g < groups; ++g) score<T, ROWS, 1>(cache, table, head, g, groups, scratch.query(), scratch.scores(), width);
  float norm[ROWS];
  for (int r = 0; r < ROWS; ++r)
    norm[r] = 1.0f / soften<T>(scratch.scores() + r * width, scratch.weights() + r * width, visible[r], width);
  constexpr long steps = LANES / T::STEP;
  for (long panel = 0; panel < dim / PANEL; ++panel) {
    typename T::Acc acc[ROWS][2];
    for (int r = 0; r < ROWS; ++r) acc[r][0] = acc[r][1] = T::zero();
    for (long group = 0; group < groups; ++group) {
      const auto* values = cache.values + cache.group(table, group * LANES, head) + panel * PANEL * LANES;
      const char* lines = upcoming.next(steps);
      multiply<T, ROWS, 2, true>((const uint32_t*)scratch.weights() + group * steps * T::WORDS, width / T::STEP * T::WORDS,
                                 (const uint8_t*)values, steps, acc, {lines, lines});
    }
    for (int r = 0; r < ROWS; ++r) {
      const __m512 scale = _mm512_set1_ps(norm[r]);
      out(r, panel * PANEL, _mm512_mul_ps(acc[r][0], scale), _mm512_mul_ps(acc[r][1], scale));
    }
  }
}

}  // namespace orca
