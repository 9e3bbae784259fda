// What is fetched into the caches while products run that are bound by arithmetic and leave memory idle: the weights of
// the next panel, and the keys and values of the next layer.
#pragma once
#include <vector>

#include "simd.h"

namespace orca {

constexpr long AHEAD_LINES = 16;  // of a piece: as many as a product's inner loop takes steps for it
constexpr long AHEAD_BYTES = 64 * AHEAD_LINES;

// How many pieces are due with each call: a rate of at most one.
class Pace {
 public:
  void set(float rate) {
    rate_ = rate;
    credit_ = 0;
  }
  ORCA_INLINE bool due() {
    credit_ += rate_;
    if (credit_ < 1) return false;
    credit_ -= 1;
    return true;
  }

 private:
  float rate_ = 0, credit_ = 0;
};

// One thread's share, handed out a few lines at a time so that they are spread over the products.
class Ahead {
 public:
  void clear() { left_ = 0; }

  // Every `stride`-th piece of the next layer's cache from `first` on. They come into the second cache and fall from there
  // into the third. rate: pieces a call, at most one.
  void aim(const void* keys, const void* values, const std::vector<size_t>& offsets, size_t first, size_t stride, float rate) {
    bases_[0] = (const char*)keys;
    bases_[1] = (const char*)values;
    offsets_ = offsets.data();
    place_ = first;
    stride_ = stride;
    left_ = offsets.size() * 2 <= first ? 0 : (offsets.size() * 2 - first + stride - 1) / stride;
    pace_.set(rate);
  }

  // The panel that this thread multiplies next, over so many calls; null: none.
  void aim_weights(const uint8_t* panel, long bytes, long calls) {
    const long pieces = panel ? (bytes + AHEAD_BYTES - 1) / AHEAD_BYTES : 0;
    weights_ = (const char*)panel;
    end_ = weights_ + pieces * AHEAD_BYTES;
    weights_pace_.set(calls > pieces ? 1.05f * (float)pieces / (float)calls : 1.0f);
  }

  // Where the next lines are; when none are due, somewhere harmless.
  ORCA_INLINE Fetch next() { return {next_weights(), next_cache()}; }

 private:
  ORCA_INLINE const char* next_weights() {
    if (weights_ == end_ || !weights_pace_.due()) return nowhere_;
    const char* piece = weights_;
    weights_ += AHEAD_BYTES;
    return piece;
  }
  ORCA_INLINE const char* next_cache() {
    if (left_ == 0 || !pace_.due()) return nowhere_;
    --left_;
    const char* piece = bases_[place_ % 2] + offsets_[place_ / 2];
    place_ += stride_;
    return piece;
  }

  const char* bases_[2] = {};
  const size_t* offsets_ = nullptr;
  size_t place_ = 0, stride_ = 1, left_ = 0;
  Pace pace_, weights_pace_;
  const char *weights_ = nullptr, *end_ = nullptr;
  alignas(64) char nowhere_[AHEAD_BYTES];
};

}  // namespace orca
