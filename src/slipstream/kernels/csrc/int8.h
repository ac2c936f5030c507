// Products with weights of 8 bits: a kind of weight in tiles [panels of 32 columns, steps of 64 numbers, 2, 16, 16, 4],
// which AMX, VNNI and AVX2 all read.
//
// Each row is rounded to whole numbers by a scale of its own. Sums of whole numbers are exact, so no order,
// thread or instruction changes them.

#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>

namespace {
namespace tiled {

using at::Tensor;

constexpr int64_t DEEP = 64, STEP = WIDE * DEEP;  // numbers of a row in a step; bytes of a panel in one

inline uint32_t bits(float x) {
  uint32_t made;
  std::memcpy(&made, &x, sizeof made);
  return made;
}

// K numbers as whole numbers from -127 to 127 at `to`, rounded to the nearest, of ties to the even one; returns
// their scale. That of numbers that are not finite is not finite, and makes their products so.
template <class T>
float quantise(const T* x, int64_t K, int8_t* to) {
  uint32_t most = 0;  // of magnitudes, as bits: NaN above all
  for (int64_t k = 0; k < K; k++) most = std::max(most, bits(float(x[k])) & 0x7fffffff);
  float highest;
  std::memcpy(&highest, &most, sizeof highest);
  const float inverse = highest > 0 ? 127 / highest : 0;
  for (int64_t k = 0; k < K; k++) to[k] = int8_t(bits(float(x[k]) * inverse + 12582912.0f));  // 1.5 · 2^23
  return highest / 127;
}

struct Int8 {
  using Number = int8_t;
  using Stored = int8_t;
  using Sum = int32_t;

  static int64_t stride(int64_t K) { return (K + DEEP - 1) / DEEP * DEEP; }
  static int64_t panel(int64_t stride) { return stride * WIDE; }

  // A row of K numbers at `to`, with zeros behind; returns its scale.
  template <class T>
  static float row(const T* x, int64_t K, int8_t* to) {
    std::fill(to + K, to + stride(K), 0);
    return quantise(x, K, to);
  }
};

// Rows `which` of a weight, times their scales: [*n, K].
Tensor int8_rows(
    const Tensor& tiles, const Tensor& scales, const Tensor& which, int64_t K, at::ScalarType dtype) {
  TORCH_CHECK(
      tiles.dim() == 6 && tiles.scalar_type() == at::kChar && tiles.is_contiguous() &&
          K <= tiles.size(1) * DEEP && tiles.size(0) == (scales.numel() + WIDE - 1) / WIDE &&
          scales.scalar_type() == at::kFloat && which.scalar_type() == at::kLong &&
          (dtype == at::kFloat || dtype == at::kBFloat16),
      "int8_rows: tiles, scales and rows do not fit");
  auto sizes = which.sizes().vec();
  sizes.push_back(K);
  const Tensor at = which.contiguous(), by = scales.contiguous(),
               out = fresh(sizes, dtype);
  const int8_t* from = tiles.const_data_ptr<int8_t>();
  auto fill = [&](auto* to) {
    for (int64_t i = 0; i < at.numel(); i++) {
      const int64_t n = at.const_data_ptr<int64_t>()[i];
      TORCH_CHECK_INDEX(0 <= n && n < by.numel(), "int8_rows: there is no row ", n);
      const int8_t* row = from + n / WIDE * tiles.size(1) * STEP + n % WIDE / 16 * (STEP / 2) + n % 16 * 4;
      const float scale = by.const_data_ptr<float>()[n];
      for (int64_t k = 0; k < K; k++)
        to[i * K + k] = float(row[k / DEEP * STEP + k % DEEP / 4 * 64 + k % 4]) * scale;
    }
  };
  if (dtype == at::kFloat) fill(out.data_ptr<float>());
  else fill(out.data_ptr<bf16>());
  return out;
}

#if !defined(__AMX_INT8__)

// The sums of R rows with a panel.
#if defined(__AVX512VNNI__)

// The instruction takes unsigned numbers on one side: columns with 128 more. What these add, 128 times the sum of
// a row, is subtracted before.
template <int R>
[[gnu::noinline]] void add_up(
    const int8_t* x, int64_t stride, const int8_t* w, int64_t steps, int32_t* sums) {
  __m512i sum[R][2];
  const __m512i high = _mm512_set1_epi8(char(0x80));
  each<R>([&](auto r) {
    __m512i parts = _mm512_setzero_si512();
    for (int64_t k = 0; k < steps; k++)
      parts = _mm512_dpbusd_epi32(parts, high, _mm512_loadu_si512(x + r * stride + k * DEEP));
    sum[r][0] = sum[r][1] = _mm512_set1_epi32(-_mm512_reduce_add_epi32(parts));
  });
  for (int64_t k = 0; k < steps; k++, x += DEEP, w += STEP)
    for (int64_t i = 0; i < 16; i++) {
      const int8_t *left = w + i * 64, *right = left + STEP / 2;
      _mm_prefetch(left + AHEAD, _MM_HINT_T1);
      _mm_prefetch(right + AHEAD, _MM_HINT_T1);
      const __m512i columns[2] = {
          _mm512_xor_si512(_mm512_loadu_si512(left), high), _mm512_xor_si512(_mm512_loadu_si512(right), high)};
      each<R>([&](auto r) {
        int32_t four;
        std::memcpy(&four, x + r * stride + i * 4, 4);
        const __m512i row = _mm512_set1_epi32(four);
        each<2>([&](auto j) { sum[r][j] = _mm512_dpbusd_epi32(sum[r][j], columns[j], row); });
      });
    }
  each<R>([&](auto r) {
    _mm512_storeu_si512(sums + r * WIDE, sum[r][0]);
    _mm512_storeu_si512(sums + r * WIDE + 16, sum[r][1]);
  });
}

#elif defined(__AVX2__)

// As numbers of 16 bits, whose products are added by pairs; eight columns at a time. Adds to `sums` behind the first
// steps. Asks for `bytes` of what is read later with each step and eight columns.
template <int R>
[[gnu::noinline]] void add_up(
    const int16_t* x, int64_t stride, const int8_t* w, int64_t steps, bool first, const int8_t* later,
    int64_t bytes, int32_t* sums) {
  for (int64_t n = 0; n < WIDE; n += 8) {
    __m256i sum[R][2];
    each<R>([&](auto r) { sum[r][0] = sum[r][1] = _mm256_setzero_si256(); });
    for (int64_t k = 0; k < steps; k++) {
      const int8_t* columns = w + k * STEP + n / 16 * (STEP / 2) + n % 16 * 4;
      ask_for(later + (k * WIDE + n) / 8 * bytes, bytes);
#pragma GCC unroll 4
      for (int64_t i = 0; i < 16; i++) {
        const __m128i* four = (const __m128i*)(columns + i * 64);
        const __m256i left = _mm256_cvtepi8_epi16(_mm_loadu_si128(four)),
                      right = _mm256_cvtepi8_epi16(_mm_loadu_si128(four + 1));
        each<R>([&](auto r) {
          const __m256i row = _mm256_broadcastq_epi64(_mm_loadl_epi64((const __m128i*)(x + r * stride + k * DEEP + i * 4)));
          sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(row, left));
          sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(row, right));
        });
      }
    }
    each<R>([&](auto r) {
      __m256i pairs = _mm256_hadd_epi32(sum[r][0], sum[r][1]);  // columns 0 1 4 5, 2 3 6 7
      pairs = _mm256_permute4x64_epi64(pairs, 0xd8);
      __m256i* to = (__m256i*)(sums + r * WIDE + n);
      _mm256_storeu_si256(to, first ? pairs : _mm256_add_epi32(pairs, _mm256_loadu_si256(to)));
    });
  }
}

// Of as many steps as the first cache holds, one behind the other, all rows are multiplied.
inline void by_blocks(
    const int8_t* x, int64_t n, int64_t stride, const int8_t* w, int64_t steps, int32_t* sums) {
  constexpr int64_t NEAR = 4, LONG = NEAR * DEEP;
  alignas(32) int16_t rows[MOST * LONG];
  const int64_t share = STEP / 4 / parts_of<TOGETHER<int8_t>>(n);
  for (int64_t k = 0; k < steps; k += NEAR) {
    const int64_t here = std::min(steps - k, NEAR);
    for (int64_t r = 0; r < n; r++)
      for (int64_t i = 0; i < here * DEEP; i++) rows[r * LONG + i] = x[r * stride + k * DEEP + i];
    const int8_t* later = w + (k + NEAR) * STEP;
    even_tiles<TOGETHER<int8_t>>(n, [&](int64_t r, auto count) {
      add_up<count>(rows + r * LONG, LONG, w + k * STEP, here, k == 0, later, share, sums + r * WIDE);
      later += NEAR * 4 * share;
    });
  }
}

#else

template <int R>
void add_up(const int8_t* x, int64_t stride, const int8_t* w, int64_t steps, int32_t* sums) {
  std::fill(sums, sums + R * WIDE, 0);
  for (int64_t k = 0; k < steps * DEEP; k++)
    for (int64_t r = 0; r < R; r++)
      for (int64_t n = 0; n < WIDE; n++)
        sums[r * WIDE + n] += int32_t(x[r * stride + k]) *
                              w[k / DEEP * STEP + n / 16 * (STEP / 2) + k % DEEP / 4 * 64 + n % 16 * 4 + k % 4];
}

#endif

#endif

}  // namespace tiled
}  // namespace
