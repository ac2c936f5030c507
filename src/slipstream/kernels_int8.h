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
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

at::Tensor attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& keys_of, double scale,
    double cap, const std::optional<at::Tensor>& sinks);

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

// Rows of whole numbers with their scales, and zeros behind.
struct Rows {
  int64_t M, stride;
  Tensor memory;
  int8_t* numbers;
  float* scales;
  Rows(int64_t M, int64_t K)
      : M(M), stride((K + DEEP - 1) / DEEP * DEEP), memory(at::empty({M * (stride + 4)}, at::kChar)),
        numbers(memory.data_ptr<int8_t>()), scales(reinterpret_cast<float*>(numbers + M * stride)) {}
};

// A row divided by the root of the mean of its squares, times `weight`.
template <class T>
struct Norm {
  const T* weight = nullptr;
  float eps = 0;
  Norm() = default;
  Norm(const std::optional<Tensor>& given, double eps)
      : weight(given ? given->const_data_ptr<T>() : nullptr), eps(eps) {}
  void operator()(const T* x, int64_t K, float* to) const {
    Vec sum[FOUR] = {Vec::set(0), Vec::set(0), Vec::set(0), Vec::set(0)};  // the first is used
    for (int64_t k = 0; k < K; k += W) {
      const Vec part = k + W <= K ? Vec::load(x + k) : tail(x + k, K - k);
      sum[0] = fma(part, part, sum[0]);
    }
    float total[FOUR];
    sums(sum, total);
    const float scale = 1 / std::sqrt(total[0] / K + eps);
    for (int64_t k = 0; k < K; k++) to[k] = float(x[k]) * scale * float(weight[k]);
  }
};

template <class T>
Rows rounded(const T* x, int64_t M, int64_t K, const Norm<T>& norm) {
  Rows made(M, K);
  at::parallel_for(0, M, std::max<int64_t>(1, 32768 / made.stride), [&](int64_t begin, int64_t end) {
    std::vector<float> normed(norm.weight ? K : 0);
    for (int64_t m = begin; m < end; m++) {
      int8_t* to = made.numbers + m * made.stride;
      if (norm.weight) norm(x + m * K, K, normed.data()), made.scales[m] = quantise(normed.data(), K, to);
      else made.scales[m] = quantise(x + m * K, K, to);
      std::fill(to + K, to + made.stride, 0);
    }
  });
  return made;
}

// Multiplies all rows with panels of columns: `weight(p, j)` is where panel p begins of the j-th of S weights
// that are read side by side. Calls done(p, m, sums [S, WIDE]) for each row.
template <int S, class Weight, class Done>
void products(const Rows& x, int64_t panels, Weight weight, Done done) {
  const int64_t part = std::max<int64_t>(MOST, (1 << 20) / x.stride / MOST * MOST);  // in the second cache
  const int64_t grain = std::max<int64_t>(1, 65536 / (S * x.stride * std::max<int64_t>(x.M, 16)));
  at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
    alignas(64) int32_t sums[S][MOST][WIDE];
    int64_t set = 0;
    for (int64_t top = 0; top < x.M; top += part)
      for (int64_t p = begin; p < end; p++)
        for (int64_t m = top; m < std::min(x.M, top + part); m += MOST) {
          const int64_t here = std::min(std::min(x.M, top + part) - m, MOST);
          if (here != set) configure(here), set = here;
          const int8_t* rows = x.numbers + m * x.stride;
          for (int j = 0; j < S; j++)
            m == top ? multiply<true>(rows, here, x.stride, weight(p, j), x.stride / DEEP, sums[j][0])
                     : multiply<false>(rows, here, x.stride, weight(p, j), x.stride / DEEP, sums[j][0]);
          for (int64_t r = 0; r < here; r++) {
            const int32_t* row[S];
            for (int j = 0; j < S; j++) row[j] = sums[j][r];
            done(p, m + r, row);
          }
        }
    if (set) release();
  });
}

// Sums of a row as numbers: times the row's scale times each of n <= WIDE columns'; behind them zeros.
template <class Sum>
void scaled(const Sum* sums, int64_t n, float row, const float* columns, float* to) {
  float factors[WIDE] = {};
  if (n < WIDE) std::copy(columns, columns + n, factors), columns = factors;
  for (int64_t i = 0; i < WIDE; i++) to[i] = float(sums[i]) * (row * columns[i]);
}

// n <= WIDE numbers, plus those at `more` if it is given.
template <class T>
void store(const float* from, int64_t n, const T* more, T* to) {
  if (n == WIDE) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {
      for (int64_t i = 0; i < WIDE; i += 16) {
        const Vec x = more ? Vec::load(from + i) + Vec::load(more + i) : Vec::load(from + i);
        _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(x.v));
      }
      return;
    }
#endif
    for (int64_t i = 0; i < WIDE; i++) to[i] = T(more ? from[i] + float(more[i]) : from[i]);
  } else {
    T whole[2][WIDE] = {};
    if (more) std::copy(more, more + n, whole[0]);
    store(from, WIDE, more ? whole[0] : nullptr, whole[1]);
    std::copy(whole[1], whole[1] + n, to);
  }
}

// x silu: x / (1 + e^-x).
inline Vec silu(Vec x) {
  const Vec zero = Vec::set(0), e = exponential(zero - max(x, zero - x));
  // Below 0 it is x e^x / (1 + e^x).
  return (max(x, zero) - max(zero - x, zero) * e) / (Vec::set(1) + e);
}

void check(const Tensor& x, at::TensorList weights, at::TensorList scales) {
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      "products of 8 bits: float32 or bfloat16 is expected");
  TORCH_CHECK(weights.size() == scales.size(), "products of 8 bits: each weight needs its scales");
  for (size_t i = 0; i < weights.size(); i++)
    TORCH_CHECK(
        weights[i].dim() == 6 && weights[i].scalar_type() == at::kChar && weights[i].is_contiguous() &&
            scales[i].scalar_type() == at::kFloat && scales[i].is_contiguous() &&
            weights[i].size(0) == (scales[i].numel() + WIDE - 1) / WIDE,
        "products of 8 bits: weights and scales do not fit");
#if defined(__AMX_INT8__)
  at::cpu::init_amx();
#endif
}

void check_norm(const Tensor& x, const std::optional<Tensor>& norm) {
  TORCH_CHECK(
      !norm || (norm->numel() == x.size(-1) && norm->is_contiguous() && norm->scalar_type() == x.scalar_type()),
      "products of 8 bits: rows and norm do not fit");
}

void check_width(const Tensor& weight, int64_t K) {
  TORCH_CHECK(weight.size(1) == (K + DEEP - 1) / DEEP, "products of 8 bits: rows and weights do not fit");
}

template <class T>
void linear_into(
    const Rows& x, at::TensorList weights, at::TensorList scales, const T* more, at::TensorList out) {
  std::vector<int64_t> first{0};  // panel of each weight
  for (const Tensor& weight : weights) first.push_back(first.back() + weight.size(0));
  auto of = [&](int64_t p) {
    int64_t i = 0;
    while (p >= first[i + 1]) i++;
    return i;
  };
  products<1>(
      x, first.back(),
      [&](int64_t p, int) {
        const int64_t i = of(p);
        return weights[i].const_data_ptr<int8_t>() + (p - first[i]) * x.stride * WIDE;
      },
      [&](int64_t p, int64_t m, const int32_t* const (&sums)[1]) {
        const int64_t i = of(p), N = scales[i].numel(), at = (p - first[i]) * WIDE, n = std::min(N - at, WIDE);
        float made[WIDE];
        scaled(sums[0], n, x.scales[m], scales[i].const_data_ptr<float>() + at, made);
        store(made, n, more ? more + m * N + at : nullptr, out[i].data_ptr<T>() + m * N + at);
      });
}

// x [..., K], after a norm if there is one, times each of the weights, which `kernels.int8_tiles` packed, plus
// `more`, if there is one weight. Scales: float32, of their columns.
std::vector<Tensor> linear(
    const Tensor& x, at::TensorList weights, at::TensorList scales, const std::optional<Tensor>& norm,
    double eps, const std::optional<Tensor>& more) {
  check(x, weights, scales);
  const int64_t K = x.size(-1), M = x.numel() / std::max<int64_t>(K, 1);
  std::vector<Tensor> out;
  auto sizes = x.sizes().vec();
  for (size_t i = 0; i < weights.size(); i++) {
    check_width(weights[i], K), sizes.back() = scales[i].numel();
    out.push_back(at::empty(sizes, x.options()));
  }
  const Tensor rows = x.contiguous(), added = more ? more->contiguous() : Tensor();
  check_norm(x, norm);
  TORCH_CHECK(
      !more || (weights.size() == 1 && more->sizes() == out[0].sizes() &&
                more->scalar_type() == x.scalar_type()),
      "int8_linear: what is added does not fit");
  if (M == 0) return out;
  auto run = [&](auto like) {
    using T = decltype(like);
    linear_into<T>(
        rounded(rows.const_data_ptr<T>(), M, K, Norm<T>(norm, eps)), weights, scales,
        more ? added.const_data_ptr<T>() : nullptr, out);
  };
  if (x.scalar_type() == at::kFloat) run(0.0f);
  else run(bf16());
  return out;
}

// Weights are gate, up and down: down(silu(gate(x)) · up(x)) + more, in fp32 until it is rounded for `down`.
// With a fourth before them, x is first multiplied by it and added to `more`, which takes the place of both.
Tensor gated(
    const Tensor& x, at::TensorList weights, at::TensorList scales, const std::optional<Tensor>& norm,
    double eps, const std::optional<Tensor>& more) {
  if (weights.size() == 4) {
    const Tensor between = linear(x, weights.slice(0, 1), scales.slice(0, 1), {}, 0, more)[0];
    return gated(between, weights.slice(1), scales.slice(1), norm, eps, between);
  }
  check(x, weights, scales);
  const int64_t K = x.size(-1), M = x.numel() / std::max<int64_t>(K, 1);
  TORCH_CHECK(
      weights.size() == 3 && scales.size() == 3 && scales[0].numel() == scales[1].numel(), "int8_gated: gate, up and down, in order");
  const int64_t inner = scales[0].numel(), N = scales[2].numel(), width = weights[0].size(0) * WIDE;
  check_width(weights[0], K), check_width(weights[1], K), check_width(weights[2], inner);
  check_norm(x, norm);
  auto sizes = x.sizes().vec();
  sizes.back() = N;
  const Tensor rows = x.contiguous(), out = at::empty(sizes, x.options()),
               added = more ? more->contiguous() : Tensor();
  TORCH_CHECK(
      !more || (more->sizes() == out.sizes() && more->scalar_type() == x.scalar_type()),
      "int8_gated: what is added does not fit");
  if (M == 0) return out;
  auto run = [&](auto like) {
    using T = decltype(like);
    const Rows read = rounded(rows.const_data_ptr<T>(), M, K, Norm<T>(norm, eps));
    const Tensor between = at::empty({M, inner}, at::kFloat);
    float* to = between.data_ptr<float>();
    products<2>(
        read, width / WIDE,
        [&](int64_t p, int j) { return weights[j].const_data_ptr<int8_t>() + p * read.stride * WIDE; },
        [&](int64_t p, int64_t m, const int32_t* const (&sums)[2]) {
          const int64_t at = p * WIDE, n = std::min(inner - at, WIDE);
          float made[2][WIDE];
          for (int j = 0; j < 2; j++)
            scaled(sums[j], n, read.scales[m], scales[j].const_data_ptr<float>() + at, made[j]);
          for (int64_t i = 0; i < WIDE; i += W)
            (silu(Vec::load(made[0] + i)) * Vec::load(made[1] + i)).store(made[0] + i);
          std::copy(made[0], made[0] + n, to + m * inner + at);
        });
    linear_into<T>(
        rounded(to, M, inner, Norm<float>()), weights.slice(2), scales.slice(2),
        more ? added.const_data_ptr<T>() : nullptr, at::TensorList(out));
  };
  if (x.scalar_type() == at::kFloat) run(0.0f);
  else run(bf16());
  return out;
}

// Heads of D numbers at x, turned by angles: x · cos + (-x2, x1) · sin, of each half's numbers.
template <class T>
void rotate(const T* x, int64_t D, const T* cos, const T* sin, T* to) {
  for (int64_t d = 0; d < D / 2; d++) {
    const float a = x[d], b = x[d + D / 2];
    to[d] = T(a * float(cos[d]) - b * float(sin[d]));
    to[d + D / 2] = T(b * float(cos[d + D / 2]) + a * float(sin[d + D / 2]));
  }
}

// Attention of rows x [B, R, K], after a norm: their queries, keys and values by three weights, turned by angles
// cos and sin [#B, R, D]. Keys and values are written to slots [B, R] of the stored ones [B, KV, all, D], of which
// the first S are read by lists. Returns [B, R, heads, D].
Tensor attend(
    const Tensor& x, at::TensorList weights, at::TensorList scales, const std::optional<Tensor>& norm,
    double eps, const Tensor& cos, const Tensor& sin, Tensor& keys, Tensor& values, const Tensor& slots,
    const Tensor& lists, int64_t S, double scale) {
  const std::vector<Tensor> made = linear(x, weights, scales, norm, eps, {});
  const int64_t B = x.size(0), R = x.size(1), KV = keys.size(1), D = keys.size(3);
  TORCH_CHECK(
      made.size() == 3 && x.dim() == 3 && made[0].size(2) % D == 0 && made[1].size(2) == KV * D &&
          made[2].size(2) == KV * D && keys.sizes() == values.sizes() && keys.size(0) == B &&
          keys.stride(3) == 1 && values.stride(3) == 1 && keys.scalar_type() == x.scalar_type() &&
          values.scalar_type() == x.scalar_type() && cos.scalar_type() == x.scalar_type() &&
          sin.scalar_type() == x.scalar_type() && cos.size(-1) == D && sin.size(-1) == D &&
          cos.numel() == sin.numel() && (cos.numel() == R * D || cos.numel() == B * R * D) &&
          slots.scalar_type() == at::kLong && slots.numel() == B * R,
      "int8_attend: rows, weights, angles and cache do not fit");
  const int64_t heads = made[0].size(2) / D, angles = cos.numel() / D;
  const Tensor c = cos.contiguous(), s = sin.contiguous(), at = slots.contiguous(),
               q = at::empty({B, heads, R, D}, x.options());
  auto run = [&](auto like) {
    using T = decltype(like);
    const int64_t* slot = at.const_data_ptr<int64_t>();
    T *k = keys.data_ptr<T>(), *v = values.data_ptr<T>(), *to = q.data_ptr<T>();
    at::parallel_for(0, B * R, 32, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++) {
        const int64_t b = m / R, r = m % R;
        const T *turn = c.const_data_ptr<T>() + m % angles * D, *by = s.const_data_ptr<T>() + m % angles * D;
        for (int64_t h = 0; h < heads; h++)
          rotate(
              made[0].const_data_ptr<T>() + (m * heads + h) * D, D, turn, by,
              to + ((b * heads + h) * R + r) * D);
        for (int64_t h = 0; h < KV; h++) {
          const T* value = made[2].const_data_ptr<T>() + (m * KV + h) * D;
          rotate(
              made[1].const_data_ptr<T>() + (m * KV + h) * D, D, turn, by,
              k + b * keys.stride(0) + h * keys.stride(1) + slot[m] * keys.stride(2));
          std::copy(
              value, value + D, v + b * values.stride(0) + h * values.stride(1) + slot[m] * values.stride(2));
        }
      }
    });
  };
  if (x.scalar_type() == at::kFloat) run(0.0f);
  else run(bf16());
  return attention(q, keys.narrow(2, 0, S), values.narrow(2, 0, S), lists, scale, 0, {});
}

// A layer: `attend`, and then `gated` by the weights behind its three.
Tensor layer(
    const Tensor& x, at::TensorList weights, at::TensorList scales, const std::optional<Tensor>& norm,
    double eps, const Tensor& cos, const Tensor& sin, Tensor& keys, Tensor& values, const Tensor& slots,
    const Tensor& lists, int64_t S, double scale, const std::optional<Tensor>& second, double second_eps) {
  TORCH_CHECK(weights.size() == 7 && scales.size() == 7, "int8_layer: seven weights are expected");
  const Tensor read = attend(
      x, weights.slice(0, 3), scales.slice(0, 3), norm, eps, cos, sin, keys, values, slots, lists, S, scale);
  return gated(read.flatten(2), weights.slice(3), scales.slice(3), second, second_eps, x);
}

}  // namespace int8
}  // namespace
