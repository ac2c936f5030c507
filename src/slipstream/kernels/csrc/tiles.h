// Products of rows with weights in tiles, and what stands around them in a decoder layer. A row's bits do not
// depend on its neighbours.
//
// A weight [N, K] lies in panels of 32 columns, and these in steps of two tiles: 16 words of 32 bits of 16
// columns, with zeros behind. A word is four numbers of 8 bits or two of bf16. Each column has a scale.

#pragma once

#include "team.h"
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace {

at::Tensor attention(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& keys_of, double scale,
    double cap, const std::optional<at::Tensor>& sinks);

namespace tiled {

constexpr int64_t WIDE = 32, BYTES = 64;  // columns of a panel; bytes of a row that a step multiplies
constexpr int64_t MOST = 32;              // rows that are multiplied at once

// Rows of which the registers hold the sums with a panel.
template <class Number>
constexpr int TOGETHER = ROWS;
#if defined(__AVX512F__)
template <>
constexpr int TOGETHER<bf16> = 12;
template <>
constexpr int TOGETHER<float> = 12;
template <>
constexpr int TOGETHER<int8_t> = 12;
template <>
constexpr int TOGETHER<uint8_t> = 8;
#elif defined(__AVX2__)
template <>
constexpr int TOGETHER<int8_t> = 4;
template <>
constexpr int TOGETHER<uint8_t> = 4;
#endif

// Asks for weights that are read later.
inline void ask_for(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const char*>(from) + i, 0, 2);
}

// How many tiles `even_tiles<R>` makes of n rows.
template <int R>
constexpr int64_t parts_of(int64_t n) {
  return (n + R - 1) / R;
}

}  // namespace tiled
}  // namespace

#include "bf16.h"
#include "int8.h"
#include "int4.h"
#include "plain.h"

namespace {
namespace tiled {

using at::Tensor;

template <class Number, class Stored, class Sum>
void by_vectors(const Number* x, int64_t n, int64_t stride, const Stored* panel, int64_t steps, Sum* sums) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  if constexpr (std::is_same_v<Number, int8_t>) return by_blocks(x, n, stride, panel, steps, sums);
  else
#endif
  even_tiles<TOGETHER<Number>>(n, [&](int64_t r, auto rows) {
    add_up<rows>(x + r * stride, stride, panel, steps, sums + r * WIDE);
  });
}

// The sums of n <= MOST rows x, which lie `stride` apart, with a panel of columns. FIRST: the weights come from
// far.
#if defined(__AMX_INT8__)

template <bool FIRST, class Number, class Sum>
  requires(!std::is_same_v<Number, float>)
void multiply(const Number* x, int64_t n, int64_t stride, const Number* panel, int64_t steps, Sum* sums) {
  stride *= sizeof(Number);
  n > amx::SIDE ? amx::multiply<true, FIRST>(x, stride, panel, steps, sums)
                : amx::multiply<false, FIRST>(x, stride, panel, steps, sums);
}
template <class Kind>
void configure(int64_t rows) {
  if constexpr (std::is_same_v<typename Kind::Number, float>) return;
  else if constexpr (!std::is_same_v<Kind, Int4>) amx::configure(std::min(rows, amx::SIDE), rows - amx::SIDE);
  else if (rows > int4::FEW) int4::configure(rows);
}
void release() { _tile_release(); }

#else

template <bool FIRST, class Number, class Sum>
  requires(!std::is_same_v<Number, float>)
void multiply(const Number* x, int64_t n, int64_t stride, const Number* panel, int64_t steps, Sum* sums) {
  by_vectors(x, n, stride, panel, steps, sums);
}
template <class Kind>
void configure(int64_t) {}
void release() {}

#endif

template <bool FIRST, class T>
void multiply(const float* x, int64_t n, int64_t stride, const T* panel, int64_t, float* sums) {
  by_vectors(x, n, stride, panel, stride, sums);
}
template <bool FIRST>
void multiply(const uint8_t* x, int64_t n, int64_t stride, const uint8_t* panel, int64_t, float* sums) {
  int4::multiply(x, n, stride, panel, stride / Int4::ROW, sums);
}

// Rows as a kind of weight multiplies them, with zeros behind. `scales`: none stands for ones.
template <class Kind>
struct Rows {
  using Number = typename Kind::Number;
  int64_t M, stride;
  const Number* numbers;
  const float* scales = nullptr;
  Tensor memory = {};
  float scale(int64_t m) const { return scales ? scales[m] : 1; }
};

// A tensor that may be absent.
using Part = std::optional<Tensor>;

const float* numbers(const Part& part) { return part ? part->const_data_ptr<float>() : nullptr; }

// Numbers of a row divided by the root of the mean of their squares, or of those of their distances from the
// mean, times `weight`, plus `shift`; without a weight they stay as they are.
struct Norm {
  Part weights, shifts;
  const float *weight = nullptr, *shift = nullptr;
  float eps = 0;
  bool centred = false;
  template <class T>
  void operator()(const T* x, int64_t K, float* to) const {
    Vec sum[FOUR] = {Vec::set(0), Vec::set(0), Vec::set(0), Vec::set(0)};  // the first is used
    auto at = [&](int64_t k) { return k + W <= K ? Vec::load(x + k) : tail(x + k, K - k); };
    float total[FOUR], mean = 0;
    if (centred) {
      for (int64_t k = 0; k < K; k += W) sum[0] = sum[0] + at(k);
      sums(sum, total);
      mean = total[0] / K, sum[0] = Vec::set(0);
    }
    const Vec middle = Vec::set(mean);
    int64_t k = 0;
    for (; k + W <= K; k += W) {
      const Vec part = Vec::load(x + k) - middle;
      sum[0] = fma(part, part, sum[0]);
    }
    if (k < K) {
      float rest[W] = {};
      for (int64_t i = k; i < K; i++) rest[i - k] = float(x[i]) - mean;
      sum[0] = fma(Vec::load(rest), Vec::load(rest), sum[0]);
    }
    sums(sum, total);
    const float scale = 1 / std::sqrt(total[0] / K + eps);
    const Vec by = Vec::set(scale);
    for (k = 0; k + W <= K; k += W) {
      Vec made = (Vec::load(x + k) - middle) * by * Vec::load(weight + k);
      if (shift) made = made + Vec::load(shift + k);
      made.store(to + k);
    }
    for (; k < K; k++) to[k] = (float(x[k]) - mean) * scale * weight[k] + (shift ? shift[k] : 0);
  }
};

// A weight in tiles. `scales`: none stands for ones; `bias`: none for zeros.
struct Weight {
  const void* tiles;
  int64_t panels, N;
  const float *scales = nullptr, *bias = nullptr;
  Weight(const Tensor& tiles, const Tensor& scales)
      : tiles(tiles.const_data_ptr()), panels(tiles.size(0)), N(scales.numel()),
        scales(scales.const_data_ptr<float>()) {}
  Weight(const Tensor& tiles, int64_t N) : tiles(tiles.const_data_ptr()), panels(tiles.size(0)), N(N) {}
  template <class Kind>
  const typename Kind::Stored* panel(int64_t p, int64_t stride) const {
    return static_cast<const typename Kind::Stored*>(tiles) + p * Kind::panel(stride);
  }
  // Sums of a row with panel p as numbers: times the row's scale times the columns', plus the bias; returns how
  // many there are.
  template <class Sum>
  int64_t scaled(const Sum* sums, int64_t p, float row, float* to) const {
    const int64_t n = std::min(N - p * WIDE, WIDE);
    float factors[WIDE] = {};
    const float* columns = factors;
    if (!scales) std::fill_n(factors, WIDE, 1.0f);
    else if (n < WIDE) std::copy_n(scales + p * WIDE, n, factors);
    else columns = scales + p * WIDE;
    for (int64_t i = 0; i < WIDE; i++) to[i] = float(sums[i]) * (row * columns[i]);
    for (int64_t i = 0; bias && i < n; i++) to[i] += bias[p * WIDE + i];
    return n;
  }
};

template <class Kind, class T>
Rows<Kind> prepared(const T* x, int64_t M, int64_t K, const Norm& norm = {}) {
  using Number = typename Kind::Number;
  const int64_t stride = Kind::stride(K);
  if constexpr (std::is_same_v<T, Number>)
    if (!norm.weight && K == stride) return {M, stride, x};
  const Tensor memory = fresh({M * (stride * int64_t(sizeof(Number)) + 4)}, at::kByte);
  Number* numbers = static_cast<Number*>(memory.data_ptr());
  float* scales = reinterpret_cast<float*>(numbers + M * stride);
  team::parallel_for(M, std::max<int64_t>(1, 2048 / stride), [&](int64_t begin, int64_t end) {
    std::vector<float> normed(norm.weight ? K : 0);
    for (int64_t m = begin; m < end; m++) {
      Number* to = numbers + m * stride;
      if (norm.weight) norm(x + m * K, K, normed.data()), scales[m] = Kind::row(normed.data(), K, to);
      else scales[m] = Kind::row(x + m * K, K, to);
    }
  });
  return {M, stride, numbers, scales, memory};
}

// Multiplies all rows with panels of columns: `weight(p, j)` is where panel p begins of the j-th of S weights
// that are read side by side. Calls done(p, m, sums [S, WIDE]) for each row.
template <int S, class Kind, class Weight, class Done>
void products(const Rows<Kind>& x, int64_t panels, Weight weight, Done done) {
  using Number = typename Kind::Number;
  const int64_t bytes = x.stride * sizeof(Number), steps = bytes / BYTES;
  const int64_t part = std::max<int64_t>(MOST, (1 << 20) / bytes / MOST * MOST);  // in the second cache
  const int64_t grain = std::max<int64_t>(1, 65536 / (S * bytes * std::max<int64_t>(x.M, 16)));
  team::parallel_for(panels, grain, [&](int64_t begin, int64_t end) {
    alignas(64) typename Kind::Sum sums[S][MOST][WIDE];
    int64_t set = 0;
    for (int64_t top = 0; top < x.M; top += part)
      for (int64_t p = begin; p < end; p++)
        for (int64_t m = top; m < std::min(x.M, top + part); m += MOST) {
          const int64_t here = std::min(std::min(x.M, top + part) - m, MOST);
          if (here != set) configure<Kind>(here), set = here;
          const Number* rows = x.numbers + m * x.stride;
          for (int j = 0; j < S; j++)
            m == top ? multiply<true>(rows, here, x.stride, weight(p, j), steps, sums[j][0])
                     : multiply<false>(rows, here, x.stride, weight(p, j), steps, sums[j][0]);
          for (int64_t r = 0; r < here; r++) {
            const typename Kind::Sum* row[S];
            for (int j = 0; j < S; j++) row[j] = sums[j][r];
            done(p, m + r, row);
          }
        }
    if (set) release();
  });
}

// n <= WIDE numbers, plus those at `more` if it is given.
template <class T, class More>
void store(const float* from, int64_t n, const More* more, T* to) {
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
    More added[WIDE] = {};
    T whole[WIDE];
    if (more) std::copy(more, more + n, added);
    store(from, WIDE, more ? added : nullptr, whole);
    std::copy(whole, whole + n, to);
  }
}

// x silu: x / (1 + e^-x).
inline Vec silu(Vec x) {
  const Vec zero = Vec::set(0), e = exponential(zero - max(x, zero - x));
  // Below 0 it is x e^x / (1 + e^x).
  return (max(x, zero) - max(zero - x, zero) * e) / (Vec::set(1) + e);
}

// Calls f(kind of weight, a number of x's type), with a processor that was made ready for tiles.
template <class F>
void by_kind(const Tensor& x, const Tensor& weight, F f) {
#if defined(__AMX_INT8__)
  at::cpu::init_amx();
#endif
  auto go = [&](auto kind) { x.scalar_type() == at::kFloat ? f(kind, 0.0f) : f(kind, bf16()); };
#if defined(__AVX512BF16__)
  if (weight.scalar_type() == at::kBFloat16) return go(Bf16());
#else
  if (weight.scalar_type() == at::kBFloat16) return go(Plain<bf16>());
#endif
  if (weight.scalar_type() == at::kFloat) return go(Plain<float>());
  weight.scalar_type() == at::kByte ? go(Int4()) : weight.dim() == 3 ? go(Plain<int8_t>()) : go(Int8());
}

// Dimensions of a weight's tiles.
int64_t dims_of(const Tensor& x, const Tensor& weight) {
  if (weight.scalar_type() == at::kByte) return 4;
  if (weight.scalar_type() == at::kChar) return weight.dim() == 3 ? 3 : 6;
  return weight.scalar_type() != x.scalar_type() ? -1 : HAS_BF16 && x.scalar_type() == at::kBFloat16 ? 5 : 3;
}

void check_width(const Tensor& weight, int64_t K) {
  const int64_t deep = weight.scalar_type() == at::kByte ? Int4::GROUP : BYTES / weight.element_size();
  const int64_t steps = weight.dim() == 3 ? Plain<float>::stride(K) : (K + deep - 1) / deep;
  TORCH_CHECK(weight.size(1) == steps, "products in tiles: rows and weights do not fit");
}

// Rows times each of the weights at `out`, plus `more`, if it is given.
template <class Kind, class T, class More>
void linear_into(
    const Rows<Kind>& x, const std::vector<Weight>& weights, const More* more, T* const* out) {
  std::vector<int64_t> first{0};  // panel of each weight
  for (const Weight& weight : weights) first.push_back(first.back() + weight.panels);
  auto of = [&](int64_t p) {
    int64_t i = 0;
    while (p >= first[i + 1]) i++;
    return i;
  };
  products<1>(
      x, first.back(),
      [&](int64_t p, int) {
        const int64_t i = of(p);
        return weights[i].panel<Kind>(p - first[i], x.stride);
      },
      [&](int64_t p, int64_t m, const typename Kind::Sum* const (&sums)[1]) {
        const int64_t i = of(p), at = (p - first[i]) * WIDE;
        float made[WIDE];
        const int64_t n = weights[i].scaled(sums[0], p - first[i], x.scale(m), made);
        store(made, n, more ? more + m * weights[i].N + at : nullptr, out[i] + m * weights[i].N + at);
      });
}

// Rows of K numbers: how many there are, and as they lie side by side.
struct Flat {
  int64_t K, M;
  Tensor x;
  explicit Flat(const Tensor& x) : K(x.size(-1)), M(x.numel() / std::max<int64_t>(K, 1)), x(x.contiguous()) {}
  Tensor wide(int64_t N) const {
    auto sizes = x.sizes().vec();
    sizes.back() = N;
    return fresh(sizes, x.scalar_type());
  }
};

// x [..., K] times a weight whose columns have scales, in float32.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& scales) {
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      "tiled_linear: float32 or bfloat16 is expected");
  TORCH_CHECK(
      weight.is_contiguous() && weight.dim() == dims_of(x, weight) && scales.scalar_type() == at::kFloat &&
          scales.is_contiguous() && weight.size(0) == (scales.numel() + WIDE - 1) / WIDE,
      "tiled_linear: weight and scales do not fit");
  const Flat rows(x);
  check_width(weight, rows.K);
  const Tensor out = rows.wide(scales.numel());
  if (rows.M == 0) return out;
  by_kind(x, weight, [&](auto kind, auto like) {
    using T = decltype(like);
    using Kind = decltype(kind);
    T* to = out.data_ptr<T>();
    const auto read = prepared<Kind>(rows.x.const_data_ptr<T>(), rows.M, rows.K);
    linear_into<Kind, T, T>(read, {Weight(weight, scales)}, nullptr, &to);
  });
  return out;
}

// x [..., K] times a weight [N, K] of the same type, plus bias [N], in the place of oneDNN's product.
Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t N) {
  TORCH_CHECK(
      packed.dim() == dims_of(x, packed) && packed.is_contiguous() && packed.size(0) == (N + WIDE - 1) / WIDE &&
          (!bias || bias->numel() == N),
      "packed_linear: x, weight and bias do not fit");
  const Flat rows(x);
  const Tensor out = rows.wide(N), added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  check_width(packed, rows.K);
  by_kind(x, packed, [&](auto kind, auto like) {
    using T = decltype(like);
    const auto read = prepared<decltype(kind)>(rows.x.const_data_ptr<T>(), rows.M, rows.K);
    T* to = out.data_ptr<T>();
    Weight weight(packed, N);
    if (bias) weight.bias = added.const_data_ptr<float>();
    linear_into<decltype(kind), T, T>(read, {weight}, nullptr, &to);
  });
  return out;
}

// Heads of D numbers at x, turned by angles: x · cos + (-x2, x1) · sin, of each half's numbers.
template <class X, class Angle, class T>
void rotate(const X* x, int64_t D, const Angle* cos, const Angle* sin, T* to) {
  const int64_t half = D / 2;
  int64_t d = 0;
  for (; d + WIDE <= half; d += WIDE) {
    float low[WIDE], high[WIDE];
    for (int64_t i = 0; i < WIDE; i += W) {
      const Vec a = Vec::load(x + d + i), b = Vec::load(x + half + d + i);
      (a * Vec::load(cos + d + i) - b * Vec::load(sin + d + i)).store(low + i);
      (b * Vec::load(cos + half + d + i) + a * Vec::load(sin + half + d + i)).store(high + i);
    }
    store<T, T>(low, WIDE, nullptr, to + d), store<T, T>(high, WIDE, nullptr, to + half + d);
  }
  for (; d < half; d++) {
    const float a = x[d], b = x[half + d];
    to[d] = T(a * float(cos[d]) - b * float(sin[d]));
    to[half + d] = T(b * float(cos[half + d]) + a * float(sin[half + d]));
  }
}

}  // namespace tiled
}  // namespace
