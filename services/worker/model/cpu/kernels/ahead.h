// Keys and values of the next layer, fetched while the products of this one run: those are bound by arithmetic and leave
// memory idle, attention is bound by memory. They come into the second cache and fall from there into the third; the
// weights, fetched with a non-temporal hint, do not drive them out.
#pragma once
#include <vector>

#include "simd.h"

namespace orca {

constexpr long AHEAD_LINES = 16;  // of a piece: as many as a product's inner loop takes steps for it

// One thread's share of the pieces, handed out a few at a time so that they are spread over the layer's products.
class Ahead {
 public:
  void clear() { left_ = 0; }
  bool any() const { return left_ > 0; }

  // Every `stride`-th piece from `first` on. rate: pieces a call, at most one.
  void aim(const void* keys, const void* values, const std::vector<size_t>& offsets, size_t first, size_t stride, float rate) {
    bases_[0] = (const char*)keys;
    bases_[1] = (const char*)values;
    offsets_ = offsets.data();
    place_ = first;
    stride_ = stride;
    left_ = offsets.size() * 2 <= first ? 0 : (offsets.size() * 2 - first + stride - 1) / stride;
    rate_ = rate;
    credit_ = 0;
  }

  // Where the next piece is; when none is due, somewhere harmless.
  ORCA_INLINE const char* next() {
    credit_ += rate_;
    if (left_ == 0 || credit_ < 1) return nowhere_;
    credit_ -= 1;
    --left_;
    const char* piece = bases_[place_ % 2] + offsets_[place_ / 2];
    place_ += stride_;
    return piece;
  }

 private:
  const char* bases_[2] = {};
  const size_t* offsets_ = nullptr;
  size_t place_ = 0, stride_ = 1, left_ = 0;
  float rate_ = 0, credit_ = 0;
  alignas(64) char nowhere_[64 * AHEAD_LINES];
};

}  // namespace orca
