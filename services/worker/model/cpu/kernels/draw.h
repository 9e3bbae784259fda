// From a row of logits to one token: inverse CDF by a uniform number, over all tokens or over the likeliest of them.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "simd.h"

namespace orca {

// The fields are those of a ctypes structure in decoder.py. sharpness: 1 / temperature; 0 takes the largest. uniform: in
// [0, 1). top_k: 0 is all; top_p, min_p: as of the OpenAI API and its kin; 1 and 0 are all. allowed: a bit per token that
// may be chosen, or null if all may.
struct Draw {
  double uniform;
  float sharpness, top_p, min_p;
  int32_t top_k;
  const uint32_t* allowed;
};

// Which of the tokens first .. first + 31 there are and may be chosen.
ORCA_INLINE uint32_t allowed_of(const uint32_t* allowed, long first, long vocabulary) {
  const long left = vocabulary - first;
  return (left >= 32 ? ~0u : (1u << left) - 1) & (allowed ? allowed[first / 32] : ~0u);
}

// Weights of a row's tokens: powers of two of what is left of the largest logit, at the temperature. The largest is 1.
class Weights {
 public:
  Weights(const float* logits, long vocabulary, float most, const Draw& draw)
      : logits_(logits), allowed_(draw.allowed), vocabulary_(vocabulary), most_(_mm512_set1_ps(most)),
        power_(_mm512_set1_ps(draw.sharpness * 1.44269504f)) {}

  long size() const { return vocabulary_; }
  __mmask16 valid(long i) const { return (__mmask16)(allowed_of(allowed_, i / 32 * 32, vocabulary_) >> i % 32); }
  // Of tokens i .. i + 15; zero where they are not valid.
  ORCA_INLINE __m512 at(long i) const {
    const __m512 x = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(logits_ + i), most_), power_);
    return _mm512_maskz_mov_ps(valid(i), exp2_512<F32>(_mm512_max_ps(x, _mm512_set1_ps(-150.0f))));
  }

 private:
  const float* logits_;
  const uint32_t* allowed_;
  const long vocabulary_;
  const __m512 most_, power_;
};

// The sums of spans of tokens, one after the other.
constexpr long SPAN = 256;
inline std::vector<double> span_sums(const Weights& weights) {
  std::vector<double> sums;
  sums.reserve(weights.size() / SPAN + 1);
  for (long begin = 0; begin < weights.size(); begin += SPAN) {
    __m512 sum = _mm512_setzero_ps();
    for (long i = begin; i < std::min(weights.size(), begin + SPAN); i += LANES) sum = _mm512_add_ps(sum, weights.at(i));
    sums.push_back(_mm512_reduce_add_ps(sum));
  }
  return sums;
}

// Over all tokens in the order of their ids: which span, then which token of it.
inline int32_t draw_plain(const Weights& weights, const std::vector<double>& sums, double total, double uniform) {
  double left = uniform * total;
  size_t span = 0, last_span = sums.size() - 1;
  while (last_span > 0 && sums[last_span] <= 0) --last_span;  // nothing there may be chosen
  while (span < last_span && left >= sums[span]) left -= sums[span++];
  const long begin = span * SPAN, end = std::min(weights.size(), begin + SPAN);
  long last = begin;  // rounding may leave something at the span's very end: its last token that can be
  for (long i = begin; i < end; i += LANES) {
    alignas(64) float weight[LANES];
    _mm512_store_ps(weight, weights.at(i));
    for (long j = 0; j < LANES && i + j < end; ++j) {
      if (weight[j] > 0) last = i + j;
      if (left < weight[j]) return (int32_t)(i + j);
      left -= weight[j];
    }
  }
  return (int32_t)last;
}

struct Candidate {
  float weight;
  int32_t token;
};

// All tokens of at least this weight.
inline void collect(const Weights& weights, float least, std::vector<Candidate>& out) {
  out.clear();
  for (long i = 0; i < weights.size(); i += LANES) {
    const __m512 weight = weights.at(i);
    uint32_t chosen = _mm512_mask_cmp_ps_mask(weights.valid(i), weight, _mm512_set1_ps(least), _CMP_GE_OQ);
    if (!chosen) continue;
    alignas(64) float value[LANES];
    _mm512_store_ps(value, weight);
    for (; chosen; chosen &= chosen - 1) {
      const int lane = __builtin_ctz(chosen);
      out.push_back({value[lane], (int32_t)(i + lane)});
    }
  }
}

// Over the likeliest, likeliest first, equals by id. Never all are sorted if fewer will do: those above a bound, which is
// lowered until they are enough.
inline int32_t draw_filtered(const Weights& weights, double total, const Draw& draw) {
  const size_t most = draw.top_k > 0 ? std::min<size_t>(draw.top_k, weights.size()) : weights.size();
  std::vector<Candidate> candidates;
  for (float least = 1.0f / 256;; least = least > 1e-30f ? least / 256 : 0.0f) {
    const bool is_last = least <= draw.min_p;
    collect(weights, is_last ? draw.min_p : least, candidates);
    double covered = 0;
    for (const Candidate& one : candidates) covered += one.weight;
    if (is_last || least == 0.0f || candidates.size() >= most || covered >= draw.top_p * total) break;
  }
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.weight > b.weight || (a.weight == b.weight && a.token < b.token);
  };
  std::sort(candidates.begin(), candidates.end(), before);
  size_t kept = 0;
  double covered = 0;
  for (; kept < candidates.size() && kept < most && (kept == 0 || covered < draw.top_p * total); ++kept)
    covered += candidates[kept].weight;
  double left = draw.uniform * covered;
  for (size_t i = 0; i + 1 < kept; ++i) {
    if (left < candidates[i].weight) return candidates[i].token;
    left -= candidates[i].weight;
  }
  return candidates[kept - 1].token;
}

inline int32_t draw_token(const float* logits, long vocabulary, float most, const Draw& draw) {
  const Weights weights(logits, vocabulary, most, draw);
  const std::vector<double> sums = span_sums(weights);
  double total = 0;
  for (const double sum : sums) total += sum;
  const bool plain = draw.top_k <= 0 && draw.top_p >= 1.0f && draw.min_p <= 0.0f;
  return plain ? draw_plain(weights, sums, total, draw.uniform) : draw_filtered(weights, total, draw);
}

}  // namespace orca
