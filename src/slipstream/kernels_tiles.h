// Products of rows with weights in tiles, and what stands around them in a decoder layer. A row's bits do not
// depend on its neighbours.
//
// A weight [N, K] lies in panels of 32 columns, and these in steps of two tiles: 16 words of 32 bits of 16
// columns, with zeros behind. A word is four numbers of 8 bits or two of bf16. Each column has a scale.

#pragma once

#include "kernels_team.h"
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
#endif

}  // namespace tiled
}  // namespace

#include "kernels_bf16.h"
#include "kernels_int8.h"
#include "kernels_int4.h"
#include "kernels_plain.h"

namespace {
namespace tiled {

using at::Tensor;

template <class Number, class Stored, class Sum>
void by_vectors(const Number* x, int64_t n, int64_t stride, const Stored* panel, int64_t steps, Sum* sums) {
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
    int64_t k = 0;
    for (; k + W <= K; k += W) (Vec::load(x + k) * Vec::set(scale) * Vec::load(weight + k)).store(to + k);
    for (; k < K; k++) to[k] = float(x[k]) * scale * float(weight[k]);
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

template <class Kind, class T, class Norm>
Rows<Kind> prepared(const T* x, int64_t M, int64_t K, const Norm& norm) {
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

// Weights in tiles that fit rows x.
std::vector<Weight> weights_of(const Tensor& x, at::TensorList weights, at::TensorList scales) {
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      "products in tiles: float32 or bfloat16 is expected");
  TORCH_CHECK(
      weights.size() == scales.size() && !weights.empty(), "products in tiles: each weight needs its scales");
  std::vector<Weight> made;
  for (size_t i = 0; i < weights.size(); i++) {
    TORCH_CHECK(
        weights[i].scalar_type() == weights[0].scalar_type() && weights[i].is_contiguous() &&
            weights[i].dim() == dims_of(x, weights[i]) &&
            scales[i].scalar_type() == at::kFloat && scales[i].is_contiguous() &&
            weights[i].size(0) == (scales[i].numel() + WIDE - 1) / WIDE,
        "products in tiles: weights and scales do not fit");
    made.emplace_back(weights[i], scales[i]);
  }
  return made;
}

void check_norm(const Tensor& x, const std::optional<Tensor>& norm) {
  TORCH_CHECK(
      !norm || (norm->numel() == x.size(-1) && norm->is_contiguous() && norm->scalar_type() == x.scalar_type()),
      "products in tiles: rows and norm do not fit");
}

void check_width(const Tensor& weight, int64_t K) {
  const int64_t deep = weight.scalar_type() == at::kByte ? Int4::GROUP : BYTES / weight.element_size();
  const int64_t steps = weight.dim() == 3 ? Plain<float>::stride(K) : (K + deep - 1) / deep;
  TORCH_CHECK(weight.size(1) == steps, "products in tiles: rows and weights do not fit");
}

void check_more(const std::optional<Tensor>& more, const std::vector<Tensor>& out) {
  TORCH_CHECK(
      !more || (out.size() == 1 && more->sizes() == out[0].sizes() &&
                more->scalar_type() == out[0].scalar_type()),
      "products in tiles: what is added does not fit");
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

// x [..., K], after a norm if there is one, times each of the weights, plus `more`, if there is one weight.
// Scales: float32, of their columns.
std::vector<Tensor> linear(
    const Tensor& x, at::TensorList weights, at::TensorList scales, const std::optional<Tensor>& norm,
    double eps, const std::optional<Tensor>& more) {
  const std::vector<Weight> all = weights_of(x, weights, scales);
  const Flat rows(x);
  std::vector<Tensor> out;
  for (size_t i = 0; i < all.size(); i++) check_width(weights[i], rows.K), out.push_back(rows.wide(all[i].N));
  check_norm(x, norm), check_more(more, out);
  if (rows.M == 0) return out;
  const Tensor added = more ? more->contiguous() : Tensor();
  by_kind(x, weights[0], [&](auto kind, auto like) {
    using T = decltype(like);
    std::vector<T*> to;
    for (Tensor& each : out) to.push_back(each.data_ptr<T>());
    linear_into(
        prepared<decltype(kind)>(rows.x.const_data_ptr<T>(), rows.M, rows.K, Norm<T>(norm, eps)), all,
        more ? added.const_data_ptr<T>() : nullptr, to.data());
  });
  return out;
}

// x [..., K] times a weight [N, K] of the same type, plus bias [N], in the place of oneDNN's product.
Tensor packed_linear(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& bias, int64_t N) {
  TORCH_CHECK(
      packed.dim() == dims_of(x, packed) && packed.is_contiguous() && packed.size(0) == (N + WIDE - 1) / WIDE && (!bias || bias->numel() == N),
      "packed_linear: x, weight and bias do not fit");
  const Flat rows(x);
  const Tensor out = rows.wide(N), added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  check_width(packed, rows.K);
  by_kind(x, packed, [&](auto kind, auto like) {
    using T = decltype(like);
    const auto read = prepared<decltype(kind)>(rows.x.const_data_ptr<T>(), rows.M, rows.K, Norm<T>());
    T* to = out.data_ptr<T>();
    Weight weight(packed, N);
    if (bias) weight.bias = added.const_data_ptr<float>();
    linear_into<decltype(kind), T, T>(read, {weight}, nullptr, &to);
  });
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
  const std::vector<Weight> all = weights_of(x, weights, scales);
  TORCH_CHECK(all.size() == 3 && all[0].N == all[1].N, "tiled_gated: gate, up and down, in order");
  const int64_t inner = all[0].N;
  const Flat rows(x);
  const Tensor out = rows.wide(all[2].N), added = more ? more->contiguous() : Tensor();
  for (int i = 0; i < 3; i++) check_width(weights[i], i < 2 ? rows.K : inner);
  check_norm(x, norm), check_more(more, {out});
  if (rows.M == 0) return out;
  by_kind(x, weights[0], [&](auto kind, auto like) {
    using T = decltype(like);
    using Kind = decltype(kind);
    const auto read = prepared<Kind>(rows.x.const_data_ptr<T>(), rows.M, rows.K, Norm<T>(norm, eps));
    const Tensor between = fresh({rows.M, inner}, at::kFloat);
    float* to = between.data_ptr<float>();
    products<2>(
        read, all[0].panels,
        [&](int64_t p, int j) { return all[j].panel<Kind>(p, read.stride); },
        [&](int64_t p, int64_t m, const typename Kind::Sum* const (&sums)[2]) {
          float made[2][WIDE];
          int64_t n;
          for (int j = 0; j < 2; j++) n = all[j].scaled(sums[j], p, read.scale(m), made[j]);
          for (int64_t i = 0; i < WIDE; i += W)
            (silu(Vec::load(made[0] + i)) * Vec::load(made[1] + i)).store(made[0] + i);
          std::copy_n(made[0], n, to + m * inner + p * WIDE);
        });
    T* down = out.data_ptr<T>();
    linear_into(
        prepared<Kind>(to, rows.M, inner, Norm<float>()), {all[2]},
        more ? added.const_data_ptr<T>() : nullptr, &down);
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
      "tiled_layer: rows, weights, angles and cache do not fit");
  const int64_t heads = made[0].size(2) / D, angles = cos.numel() / D;
  const Tensor c = cos.contiguous(), s = sin.contiguous(), at = slots.contiguous(),
               q = fresh({B, heads, R, D}, x.scalar_type());
  auto run = [&](auto like) {
    using T = decltype(like);
    const int64_t* slot = at.const_data_ptr<int64_t>();
    T *k = keys.data_ptr<T>(), *v = values.data_ptr<T>(), *to = q.data_ptr<T>();
    team::parallel_for(B * R, 4, [&](int64_t begin, int64_t end) {
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
  TORCH_CHECK(weights.size() == 7 && scales.size() == 7, "tiled_layer: seven weights are expected");
  const Tensor read = attend(
      x, weights.slice(0, 3), scales.slice(0, 3), norm, eps, cos, sin, keys, values, slots, lists, S, scale);
  return gated(read.flatten(2), weights.slice(3), scales.slice(3), second, second_eps, x);
}

}  // namespace tiled
}  // namespace
