// Products with weights of bf16: a kind of weight in tiles [panels of 32 columns, steps of 32 numbers, 2, 16, 32].
//
// AMX and AVX-512 add up pairs of numbers in their order along a row, whatever the number of rows.

#pragma once

#include "team.h"
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>

#include "memory.h"

namespace {
namespace tiled {

#if defined(__AVX512BF16__)

constexpr bool HAS_BF16 = true;

struct Bf16 {
  using Number = bf16;
  using Stored = bf16;
  using Sum = float;

  static int64_t stride(int64_t K) { return (K + BYTES / 2 - 1) / (BYTES / 2) * (BYTES / 2); }
  static int64_t panel(int64_t stride) { return stride * WIDE; }

  // A row of K numbers at `to`, with zeros behind; it has no scale.
  template <class T>
  static float row(const T* x, int64_t K, bf16* to) {
    int64_t k = 0;
    for (; k + W <= K; k += W)
      _mm256_storeu_si256((__m256i*)(to + k), (__m256i)_mm512_cvtneps_pbh(Vec::load(x + k).v));
    std::copy(x + k, x + K, to + k);
    std::fill(to + K, to + stride(K), bf16(0));
    return 1;
  }
};

#if !defined(__AMX_BF16__)

#if defined(HALF_RATE_PAIRS)
constexpr int FEW = 1;  // rows that wait for weights, however they are multiplied
#else
constexpr int FEW = 32;
#endif

// The sums of R rows with a panel: of each pair of numbers first the second. Some processors take twice as long
// for a pair as for two numbers, and there more than a few rows are multiplied number by number.
template <int R>
[[gnu::noinline]] void add_up(const bf16* x, int64_t stride, const bf16* w, int64_t steps, float* sums) {
  __m512 sum[R][2];
  each<R>([&](auto i) { sum[i][0] = sum[i][1] = _mm512_setzero_ps(); });
  const char* words = reinterpret_cast<const char*>(w);
  const __m512i upper = _mm512_set1_epi32(0xffff0000);
  for (int64_t k = 0; k < steps; k++, x += BYTES / 2, words += WIDE * BYTES) {
    alignas(64) float numbers[R > FEW ? R : 1][BYTES / 2];
    if constexpr (R > FEW)
      each<R>([&](auto r) {
        each<2>([&](auto j) { Vec::load(x + r * stride + j * W).store(numbers[r] + j * W); });
      });
    for (int64_t i = 0; i < 16; i++) {
      const char *left = words + i * 64, *right = left + WIDE / 2 * BYTES;
      _mm_prefetch(left + AHEAD, _MM_HINT_T1);
      _mm_prefetch(right + AHEAD, _MM_HINT_T1);
      const __m512i columns[2] = {_mm512_loadu_si512(left), _mm512_loadu_si512(right)};
      if constexpr (R > FEW) {
        const __m512 second[2] = {
            (__m512)_mm512_and_si512(columns[0], upper), (__m512)_mm512_and_si512(columns[1], upper)};
        const __m512 first[2] = {
            (__m512)_mm512_slli_epi32(columns[0], 16), (__m512)_mm512_slli_epi32(columns[1], 16)};
        each<R>([&](auto r) {
          const __m512 row = _mm512_set1_ps(numbers[r][2 * i + 1]);
          each<2>([&](auto j) { sum[r][j] = _mm512_fmadd_ps(row, second[j], sum[r][j]); });
        });
        each<R>([&](auto r) {
          const __m512 row = _mm512_set1_ps(numbers[r][2 * i]);
          each<2>([&](auto j) { sum[r][j] = _mm512_fmadd_ps(row, first[j], sum[r][j]); });
        });
      } else {
        each<R>([&](auto r) {
          int32_t pair;
          std::memcpy(&pair, x + r * stride + i * 2, 4);
          const __m512bh row = (__m512bh)_mm512_set1_epi32(pair);
          each<2>([&](auto j) { sum[r][j] = _mm512_dpbf16_ps(sum[r][j], row, (__m512bh)columns[j]); });
        });
      }
    }
  }
  each<R>([&](auto r) {
    _mm512_storeu_ps(sums + r * WIDE, sum[r][0]), _mm512_storeu_ps(sums + r * WIDE + 16, sum[r][1]);
  });
}

#endif

// A weight [N, K] in tiles.
Tensor bf16_tiles(const Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kBFloat16, "tiles: a bf16 matrix is expected");
  constexpr int64_t SIDE = 16, DEEP = BYTES / 2;
  const Tensor w = weight.contiguous();
  const int64_t N = w.size(0), K = w.size(1), panels = (N + WIDE - 1) / WIDE, steps = (K + DEEP - 1) / DEEP;
  Tensor made = huge({panels, steps, 2, SIDE, DEEP}, at::kBFloat16);
  const bf16* from = w.const_data_ptr<bf16>();
  bf16* to = made.data_ptr<bf16>();
  team::parallel_for(panels * steps, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++)
      for (int64_t column = 0; column < WIDE; column++) {
        const int64_t n = i / steps * WIDE + column, k = i % steps * DEEP;
        bf16 row[DEEP] = {};
        if (n < N) std::copy_n(from + n * K + k, std::min(K - k, DEEP), row);
        bf16* words = to + i * WIDE * DEEP + column / SIDE * SIDE * DEEP + column % SIDE * 2;
        for (int64_t j = 0; j < DEEP; j += 2) std::memcpy(words + j / 2 * DEEP, row + j, 2 * sizeof(bf16));
      }
  });
  return made;
}

#else

constexpr bool HAS_BF16 = false;

#endif

}  // namespace tiled
}  // namespace
