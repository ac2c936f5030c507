// Products of 8 bits, in which a row's bits do not depend on its neighbours.
//
// Each row is rounded to whole numbers by a scale of its own. Sums of whole numbers are exact, so no order,
// thread or instruction changes them. Weights [N, K] lie as [panels of 32 columns, steps of 64 numbers,
// 2, 16, 16, 4]: vectors of 16 columns by 4 numbers, which AMX, VNNI and AVX2 all read, with zeros behind.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace {
namespace int8 {

using at::Tensor;
using bf16 = c10::BFloat16;

constexpr int64_t WIDE = 32, DEEP = 64, STEP = WIDE * DEEP;  // columns and numbers of a step, its bytes
constexpr int64_t MOST = 32;                                 // rows that are multiplied at once

inline uint32_t bits(float x) {
  uint32_t made;
  std::memcpy(&made, &x, sizeof made);
  return made;
}

// A row of K numbers as whole numbers from -127 to 127 at `to`, rounded to the nearest, of ties to the even
// one; returns its scale. The scale of a row that is not finite is not finite, and makes its products so.
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

#if defined(__AMX_INT8__)

// The sums of n <= MOST rows x with a panel of columns. FIRST: the weights come from far.
template <bool FIRST>
void multiply(const int8_t* x, int64_t n, int64_t stride, const int8_t* w, int64_t steps, int32_t* sums) {
  n > amx::SIDE ? amx::multiply<true, FIRST>(x, stride, w, steps, sums)
                : amx::multiply<false, FIRST>(x, stride, w, steps, sums);
}
void configure(int64_t rows) { amx::configure(std::min(rows, amx::SIDE), rows - amx::SIDE); }
void release() { _tile_release(); }

#else

// The sums of R rows with a panel.
#if defined(__AVX512VNNI__)

// The instruction takes unsigned rows: 128 more, whose products with the columns are subtracted.
template <int R>
[[gnu::noinline]] void add_up(
    const int8_t* x, int64_t stride, const int8_t* w, int64_t steps, int32_t* sums) {
  __m512i sum[R][2], more[2];
  const __m512i high = _mm512_set1_epi8(char(0x80));
  each<R>([&](auto i) { sum[i][0] = sum[i][1] = _mm512_setzero_si512(); });
  more[0] = more[1] = _mm512_setzero_si512();
  for (int64_t k = 0; k < steps; k++, x += DEEP, w += STEP)
    for (int64_t i = 0; i < 16; i++) {
      _mm_prefetch(reinterpret_cast<const char*>(w) + STEP + i * 64, _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(w) + STEP + STEP / 2 + i * 64, _MM_HINT_T0);
      const __m512i left = _mm512_loadu_si512(w + i * 64), right = _mm512_loadu_si512(w + STEP / 2 + i * 64);
      more[0] = _mm512_dpbusd_epi32(more[0], high, left), more[1] = _mm512_dpbusd_epi32(more[1], high, right);
      each<R>([&](auto r) {
        int32_t four;
        std::memcpy(&four, x + r * stride + i * 4, 4);
        const __m512i row = _mm512_xor_si512(_mm512_set1_epi32(four), high);
        sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], row, left);
        sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], row, right);
      });
    }
  each<R>([&](auto r) {
    _mm512_storeu_si512(sums + r * WIDE, _mm512_sub_epi32(sum[r][0], more[0]));
    _mm512_storeu_si512(sums + r * WIDE + 16, _mm512_sub_epi32(sum[r][1], more[1]));
  });
}

#elif defined(__AVX2__)

// As numbers of 16 bits, whose products are added by pairs; eight columns at a time.
template <int R>
[[gnu::noinline]] void add_up(
    const int8_t* x, int64_t stride, const int8_t* w, int64_t steps, int32_t* sums) {
  for (int64_t n = 0; n < WIDE; n += 8) {
    __m256i sum[R][2];
    each<R>([&](auto r) { sum[r][0] = sum[r][1] = _mm256_setzero_si256(); });
    for (int64_t k = 0; k < steps; k++)
      for (int64_t i = 0; i < 16; i++) {
        const int8_t* columns = w + k * STEP + n / 16 * (STEP / 2) + i * 64 + n % 16 * 4;
        const __m256i left = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)columns)),
                      right = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(columns + 16)));
        each<R>([&](auto r) {
          int32_t four;
          std::memcpy(&four, x + r * stride + k * DEEP + i * 4, 4);
          const __m256i row = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
          sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(row, left));
          sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(row, right));
        });
      }
    each<R>([&](auto r) {
      const __m256i pairs = _mm256_hadd_epi32(sum[r][0], sum[r][1]);  // columns 0 1 4 5, 2 3 6 7
      _mm256_storeu_si256((__m256i*)(sums + r * WIDE + n), _mm256_permute4x64_epi64(pairs, 0xd8));
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

template <bool FIRST>
void multiply(const int8_t* x, int64_t n, int64_t stride, const int8_t* w, int64_t steps, int32_t* sums) {
  tiles(n, [&](int64_t r, auto rows) {
    add_up<rows>(x + r * stride, stride, w, steps, sums + r * WIDE);
  });
}
void configure(int64_t) {}
void release() {}

#endif

// n sums of a row as products, by the row's scale times each column's.
template <class T>
void scaled(const int32_t* sums, int64_t n, float row, const float* columns, T* to) {
  for (int64_t i = 0; i < n; i++) to[i] = T(float(sums[i]) * (row * columns[i]));
}

#if defined(__AVX512BF16__)
template <>
void scaled(const int32_t* sums, int64_t n, float row, const float* columns, bf16* to) {
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 mask = (1u << std::min<int64_t>(n - i, 16)) - 1;
    const __m512 scale = _mm512_mul_ps(_mm512_set1_ps(row), _mm512_maskz_loadu_ps(mask, columns + i));
    const __m512 made = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(mask, sums + i)), scale);
    _mm256_mask_storeu_epi16(to + i, mask, (__m256i)_mm512_cvtneps_pbh(made));
  }
}
#endif

template <class T>
void linear_into(
    const T* x, int64_t M, int64_t K, at::TensorList weights, at::TensorList scales,
    const std::vector<Tensor>& out) {
  const int64_t steps = (K + DEEP - 1) / DEEP, stride = steps * DEEP, panel = steps * STEP;
  const Tensor rounded = at::empty({M, stride}, at::kChar), factors = at::empty({M}, at::kFloat);
  int8_t* rows = rounded.data_ptr<int8_t>();
  float* factor = factors.data_ptr<float>();
  at::parallel_for(0, M, std::max<int64_t>(1, 32768 / stride), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; m++) {
      factor[m] = quantise(x + m * K, K, rows + m * stride);
      std::fill(rows + m * stride + K, rows + (m + 1) * stride, 0);
    }
  });
  std::vector<int64_t> first{0};  // panel of each weight
  for (const Tensor& weight : weights) first.push_back(first.back() + weight.size(0));
  const int64_t part = std::max<int64_t>(MOST, (1 << 20) / stride / MOST * MOST);  // rows in the second cache
  auto run = [&](int64_t begin, int64_t end) {
    alignas(64) int32_t sums[MOST * WIDE];
    int64_t set = 0;
    for (int64_t top = 0; top < M; top += part)
      for (int64_t p = begin, i = 0; p < end; p++) {
        while (p >= first[i + 1]) i++;
        const int64_t N = scales[i].numel(), n = (p - first[i]) * WIDE;
        const int8_t* w = weights[i].const_data_ptr<int8_t>() + (p - first[i]) * panel;
        for (int64_t m = top; m < std::min(M, top + part); m += MOST) {
          const int64_t here = std::min(std::min(M, top + part) - m, MOST);
          if (here != set) configure(here), set = here;
          m == top ? multiply<true>(rows + m * stride, here, stride, w, steps, sums)
                   : multiply<false>(rows + m * stride, here, stride, w, steps, sums);
          for (int64_t r = 0; r < here; r++)
            scaled(
                sums + r * WIDE, std::min(N - n, WIDE), factor[m + r], scales[i].const_data_ptr<float>() + n,
                out[i].data_ptr<T>() + (m + r) * N + n);
        }
      }
    if (set) release();
  };
  at::parallel_for(0, first.back(), std::max<int64_t>(1, 65536 / (stride * std::max<int64_t>(M, 16))), run);
}

// x [..., K] times each of the weights, which `quantised.tiles` packed; scales: float32, of their columns.
std::vector<Tensor> linear(const Tensor& x, at::TensorList weights, at::TensorList scales) {
  const int64_t K = x.size(-1), M = x.numel() / std::max<int64_t>(K, 1);
  TORCH_CHECK(weights.size() == scales.size(), "int8_linear: each weight needs its scales");
  std::vector<Tensor> out;
  auto sizes = x.sizes().vec();
  for (size_t i = 0; i < weights.size(); i++) {
    const int64_t N = scales[i].numel();
    TORCH_CHECK(
        weights[i].dim() == 6 && weights[i].scalar_type() == at::kChar && weights[i].is_contiguous() &&
            scales[i].scalar_type() == at::kFloat && scales[i].is_contiguous() &&
            weights[i].size(0) == (N + WIDE - 1) / WIDE && weights[i].size(1) == (K + DEEP - 1) / DEEP,
        "int8_linear: x, weights and scales do not fit");
    sizes.back() = N;
    out.push_back(at::empty(sizes, x.options()));
  }
  const Tensor rows = x.contiguous();
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      "int8_linear: float32 or bfloat16 is expected");
#if defined(__AMX_INT8__)
  at::cpu::init_amx();
#endif
  if (M == 0) return out;
  if (x.scalar_type() == at::kFloat) linear_into(rows.const_data_ptr<float>(), M, K, weights, scales, out);
  else linear_into(rows.const_data_ptr<bf16>(), M, K, weights, scales, out);
  return out;
}

}  // namespace int8
}  // namespace
