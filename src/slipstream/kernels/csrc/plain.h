// Products of rows as they are, in fp32, with weights of fp32, or of 8 bits for heads, which few rows pass
// through, so that memory alone counts: a kind of weight in panels of 32 columns, number by number.

#pragma once

#include <algorithm>

#include "memory.h"

namespace {
namespace tiled {

template <class T>
struct Plain {
  using Number = float;
  using Stored = T;
  using Sum = float;

  static int64_t stride(int64_t K) { return (K + 15) / 16 * 16; }
  static int64_t panel(int64_t stride) { return stride * WIDE; }

  template <class X>
  static float row(const X* x, int64_t K, float* to) {
    std::copy(x, x + K, to);
    std::fill(to + K, to + stride(K), 0.0f);
    return 1;
  }
};

// The sums of R rows with a panel, in the order of K.
template <int R, class T>
[[gnu::noinline]] void add_up(const float* x, int64_t stride, const T* w, int64_t K, float* sums) {
  constexpr int COLUMNS = WIDE / W, DEEP = 4, LINE = 64;
  Vec sum[R][COLUMNS];
  each<R>([&](auto r) { each<COLUMNS>([&](auto j) { sum[r][j] = Vec::set(0); }); });
  for (int64_t k = 0; k < K; k += DEEP, w += DEEP * WIDE) {
    each<DEEP * WIDE * sizeof(T) / LINE>(
        [&](auto i) { __builtin_prefetch(reinterpret_cast<const char*>(w) + AHEAD + i * LINE, 0, 2); });
    each<DEEP>([&](auto i) {
      Vec column[COLUMNS];
      each<COLUMNS>([&](auto j) { column[j] = Vec::load(w + i * WIDE + j * W); });
      each<R>([&](auto r) {
        const Vec row = Vec::set(x[r * stride + k + i]);
        each<COLUMNS>([&](auto j) { sum[r][j] = fma(row, column[j], sum[r][j]); });
      });
    });
  }
  each<R>([&](auto r) { each<COLUMNS>([&](auto j) { sum[r][j].store(sums + r * WIDE + j * W); }); });
}

}  // namespace tiled
}  // namespace
