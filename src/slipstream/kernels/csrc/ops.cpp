// Attention and products on the CPU that give a row the same bits whatever rows stand beside it.
//
// Every sum has one order, which depends on nothing but what is summed: a dot product runs over its vectors
// of W numbers and then over the W partial sums by pairs; attention adds values in the order of the keys.
// Tiles, threads and the number of rows decide only when a sum is made.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

using at::Tensor;
using bf16 = c10::BFloat16;

#if defined(__AVX512F__)

struct Vec {
  static constexpr int W = 16, ROWS = 6;  // numbers in a vector; rows of a tile that the registers hold
  __m512 v;
  static Vec set(float x) { return {_mm512_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16))};
  }
  static Vec load(const int8_t* p) {
    __m128i eighth = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(eighth))};
  }
  void store(float* p) const { _mm512_storeu_ps(p, v); }
  __m256 folded() const {
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(v), high);
  }
};
Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
Vec rounded(Vec a) { return {_mm512_roundscale_ps(a.v, 0)}; }
Vec power_of_two(Vec n) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23))};
}

#elif defined(__AVX2__) && defined(__FMA__)

struct Vec {
  static constexpr int W = 8, ROWS = 3;
  __m256 v;
  static Vec set(float x) { return {_mm256_set1_ps(x)}; }
  static Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
  static Vec load(const bf16* p) {
    __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16))};
  }
  static Vec load(const int8_t* p) {
    __m128i eighth = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eighth))};
  }
  void store(float* p) const { _mm256_storeu_ps(p, v); }
  __m256 folded() const { return v; }
};
Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
Vec rounded(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
Vec power_of_two(Vec n) {
  return {_mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23))};
}

#else  // any processor: loops that a compiler makes vectors of

struct Vec {
  static constexpr int W = 8, ROWS = 3;
  float v[W];
  template <class F>
  static Vec of(F each) {
    Vec made;
    for (int i = 0; i < W; i++) made.v[i] = each(i);
    return made;
  }
  static Vec set(float x) {
    return of([=](int) { return x; });
  }
  template <class T>
  static Vec load(const T* p) {
    return of([=](int i) { return float(p[i]); });
  }
  void store(float* p) const { std::memcpy(p, v, sizeof v); }
};
Vec fma(Vec a, Vec b, Vec c) {
  return Vec::of([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
Vec operator+(Vec a, Vec b) {
  return Vec::of([&](int i) { return a.v[i] + b.v[i]; });
}
Vec operator-(Vec a, Vec b) {
  return Vec::of([&](int i) { return a.v[i] - b.v[i]; });
}
Vec operator*(Vec a, Vec b) {
  return Vec::of([&](int i) { return a.v[i] * b.v[i]; });
}
Vec operator/(Vec a, Vec b) {
  return Vec::of([&](int i) { return a.v[i] / b.v[i]; });
}
Vec max(Vec a, Vec b) {
  return Vec::of([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
Vec rounded(Vec a) {
  return Vec::of([&](int i) { return std::nearbyint(a.v[i]); });
}
Vec power_of_two(Vec n) {
  return Vec::of([&](int i) { return std::ldexp(1.0f, int(n.v[i])); });
}

#endif

constexpr int W = Vec::W;
constexpr int ROWS = Vec::ROWS;
constexpr int FOUR = 4;  // columns of a tile
// Bytes of weights that are asked for before they are multiplied. They go to the second cache: in the first too
// few lines can wait for memory, so that weights come half as quickly.
constexpr int64_t AHEAD = 8192;

int64_t padded(int64_t n) { return (n + W - 1) / W * W; }

// The sums of four vectors, each by pairs: of 16 partial sums first those 8 apart.
void sums(const Vec (&x)[FOUR], float* out) {
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__))
  __m256 pairs = _mm256_hadd_ps(
      _mm256_hadd_ps(x[0].folded(), x[1].folded()), _mm256_hadd_ps(x[2].folded(), x[3].folded()));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  for (int i = 0; i < FOUR; i++) {
    const float* v = x[i].v;
    out[i] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
  }
#endif
}

template <class T>
Vec tail(const T* p, int64_t n) {
  T whole[W] = {};
  std::copy(p, p + n, whole);
  return Vec::load(whole);
}

// Calls f(0), …, f(N - 1) with constants, so that an array that it indexes can live in registers.
template <int N, class F>
[[gnu::always_inline]] inline void each(F f) {
  [&]<int... I>(std::integer_sequence<int, I...>) {
    (f(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, N>());
}

// The dot products of R rows a with four rows b of K numbers, in W partial sums each. They begin with those
// at `from`, if given, and end as sums at `out` or, if that is not given, at `to`. Not inlined: the compiler
// then keeps the partial sums in registers.
template <int R, class T>
[[gnu::noinline]] void multiply(
    const float* a, int64_t stride, const T* const (&b)[FOUR], int64_t K, const Vec* from, Vec* to,
    float (*out)[FOUR]) {
  Vec sum[R][FOUR];
  each<R>([&](auto i) { each<FOUR>([&](auto j) { sum[i][j] = from ? from[i * FOUR + j] : Vec::set(0); }); });
  int64_t k = 0;
#pragma GCC unroll 4  // half as fast without it
  for (; k + W <= K; k += W) {
    Vec row[R];  // with the sums and one column they fill the registers
    each<R>([&](auto i) { row[i] = Vec::load(a + i * stride + k); });
    each<FOUR>([&](auto j) {
      __builtin_prefetch(reinterpret_cast<const char*>(b[j] + k) + AHEAD, 0, 2);
      Vec column = Vec::load(b[j] + k);
      each<R>([&](auto i) { sum[i][j] = fma(row[i], column, sum[i][j]); });
    });
  }
  if (k < K)
    each<R>([&](auto i) {
      Vec row = tail(a + i * stride + k, K - k);
      each<FOUR>([&](auto j) { sum[i][j] = fma(row, tail(b[j] + k, K - k), sum[i][j]); });
    });
  if (out) each<R>([&](auto i) { sums(sum[i], out[i]); });
  else each<R>([&](auto i) { each<FOUR>([&](auto j) { to[i * FOUR + j] = sum[i][j]; }); });
}

// Calls f with each tile of at most ROWS of n rows: f(first row, its number of rows as a constant).
template <int R = ROWS, class F>
void tiles(int64_t n, F f, int64_t first = 0) {
  for (; first + R <= n; first += R) f(first, std::integral_constant<int, R>());
  if constexpr (R > 1)
    if (first < n) tiles<R - 1>(n, f, first);
}

// The same with as few tiles as can be, of nearly the same size: a small one waits for its own sums.
template <int R, class F>
void even_tiles(int64_t n, F f) {
  for (int64_t first = 0, parts = (n + R - 1) / R; parts > 0; parts--) {
    const int64_t size = (n - first + parts - 1) / parts;
    tiles<R>(first + size, f, first);
    first += size;
  }
}

// e^x for x <= 0, within 2 units in the last place; below -87.5 it is that of -87.5, and of NaN it is NaN.
Vec exponential(Vec x) {
  x = max(Vec::set(-87.5f), x);
  Vec n = rounded(x * Vec::set(1.44269504f));
  Vec r = fma(n, Vec::set(-0.693359375f), x);
  r = fma(n, Vec::set(2.12194440e-4f), r);
  Vec p = Vec::set(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, r, Vec::set(c));
  p = fma(p, r * r, r + Vec::set(1));
  return p * power_of_two(n);
}

// cap tanh(x / cap), by e^(-2 |x| / cap).
Vec capped(Vec x, float cap) {
  x = x * Vec::set(1 / cap);
  const Vec zero = Vec::set(0), e = exponential(max(x, zero - x) * Vec::set(-2));
  const Vec t = Vec::set(cap) * ((Vec::set(1) - e) / (Vec::set(1) + e));
  float sign[W], value[W];
  x.store(sign), t.store(value);
  for (int i = 0; i < W; i++) value[i] = std::copysign(value[i], sign[i]);
  return Vec::load(value);
}

}  // namespace

#include "memory.h"
#include "team.h"

#if defined(__AMX_BF16__)
#include "amx.h"
#endif

#include "tiles.h"

namespace {

template <class T>
void linear_into(
    const float* x, const T* weight, const float* bias, float* out, int64_t M, int64_t K, int64_t N) {
  // A part of a few rows of x stays in the first cache, while some rows of weights pass from the second.
  const int64_t parts = (K + 639) / 640, part = padded((K + parts - 1) / std::max<int64_t>(parts, 1));
  const int64_t block = std::min(M, std::max<int64_t>(ROWS, 5632 / std::max<int64_t>(part, 1) / ROWS * ROWS));
  const int64_t chunk = 16 * FOUR;
  team::parallel_for(
      (N + FOUR - 1) / FOUR, std::max<int64_t>(1, 32768 / (M * K)), [&](int64_t begin, int64_t end) {
        std::vector<Vec> partial(block * chunk);  // sums over the parts so far
        const int64_t last = std::min(N, end * FOUR);
        auto add = [&](int64_t top, int64_t n, int64_t k, Vec* kept) {
          const int64_t size = std::min(part, K - k), width = std::min<int64_t>(FOUR, N - n);
          const T* columns[FOUR];
          for (int j = 0; j < FOUR; j++) columns[j] = weight + std::min(n + j, N - 1) * K + k;
          tiles(std::min(block, M - top), [&](int64_t first, auto rows) {
            Vec* sum = kept + first * FOUR;
            float made[rows][FOUR];
            const bool last_part = k + size == K;
            multiply<rows>(
                x + (top + first) * K + k, K, columns, size, k ? sum : nullptr, sum,
                last_part ? made : nullptr);
            for (int i = 0; last_part && i < rows; i++)
              for (int j = 0; j < width; j++)
                out[(top + first + i) * N + n + j] = bias ? made[i][j] + bias[n + j] : made[i][j];
          });
        };
        for (int64_t left = begin * FOUR; left < last; left += chunk)
          for (int64_t top = 0; top < M; top += block)
            for (int64_t k = 0; k < K; k += part)
              for (int64_t n = left; n < std::min(last, left + chunk); n += FOUR)
                add(top, n, k, &partial[(n - left) * block]);
      });
}

// x [..., K] times weight [N, K] as it lies in memory, plus bias [N].
Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const int64_t K = weight.size(1), N = weight.size(0), M = x.numel() / std::max<int64_t>(K, 1);
  TORCH_CHECK(x.size(-1) == K && x.scalar_type() == weight.scalar_type(), "linear: x and weight do not fit");
  TORCH_CHECK(!bias || bias->numel() == N, "linear: bias and weight do not fit");
  Tensor rows = x.to(at::kFloat).contiguous(), w = weight.contiguous(), b;
  if (bias) b = bias->to(at::kFloat).contiguous();
  auto sizes = x.sizes().vec();
  sizes.back() = N;
  Tensor out = fresh(sizes, at::kFloat);
  const float* added = bias ? b.const_data_ptr<float>() : nullptr;
  if (M == 0) return out.to(x.scalar_type());
  if (w.scalar_type() == at::kFloat)
    linear_into(
        rows.const_data_ptr<float>(), w.const_data_ptr<float>(), added, out.data_ptr<float>(), M, K, N);
  else
    linear_into(
        rows.const_data_ptr<float>(), w.const_data_ptr<bf16>(), added, out.data_ptr<float>(), M, K, N);
  return out.to(x.scalar_type());
}

// Where the j-th key of a row lies: a run of slots, or a list of them.
struct Run {
  int64_t offset;
  int64_t operator()(int64_t j) const { return j + offset; }
};
struct Listed {
  const int32_t* slots;
  int64_t first;
  int64_t operator()(int64_t j) const { return slots[j - first]; }
};

// What one row reads: slots [0, memory), if that is positive, then [first, end), then those of its list up to
// the first negative one.
struct Row {
  int64_t memory, first, text, size;
  int64_t begin = 0;  // the number of its first key in its tile, where a key that rows share has one number
  const int32_t* list;
  Row(const int32_t* keys, int64_t width) : memory(std::max(keys[0], 0)), first(keys[1]), list(keys + 3) {
    text = memory + keys[2] - first, size = text;
    while (size - text < width - 3 && list[size - text] >= 0) size++;
  }
  // Calls f(begin, end, where) for the parts of its keys with numbers in [from, to).
  template <class F>
  void parts(int64_t from, int64_t to, F f) const {
    auto part = [&](int64_t low, int64_t high, auto where) {
      low = std::max(low, from), high = std::min(high, to);
      if (low < high) f(low, high, where);
    };
    part(begin, begin + memory, Run{-begin});
    part(begin + memory, begin + text, Run{first - memory - begin});
    part(begin + text, begin + size, Listed{list, begin + text});
  }
};

// The keys and values of one text and one head.
template <class T>
struct Head {
  const T *keys, *values;
  int64_t key_stride, value_stride;
};

// Scores of the keys [begin, end), which are the same for R rows. Rows lie `apart`, with zeros behind.
template <int R, class T, class Slot>
void score(
    const float* q, int64_t apart, int64_t D, const Head<T>& head, int64_t begin, int64_t end, Slot slot,
    float* s, int64_t stride) {
  for (int64_t j = begin; j < end; j += FOUR) {
    const T* keys[FOUR];
    for (int i = 0; i < FOUR; i++) keys[i] = head.keys + slot(std::min(j + i, end - 1)) * head.key_stride;
    float made[R][FOUR];
    multiply<R, T>(q, apart, keys, D, nullptr, nullptr, made);
    for (int r = 0; r < R; r++) {
      if (j + FOUR <= end) std::memcpy(s + r * stride + j, made[r], sizeof made[r]);
      else std::copy(made[r], made[r] + (end - j), s + r * stride + j);
    }
  }
}

// What rows are scored in, and how many together.
template <class T>
struct Scored {
  using Number = float;
  static constexpr int ROWS = Vec::ROWS;
};

#if defined(__AVX512BF16__)

template <>
struct Scored<bf16> {
  using Number = bf16;
  static constexpr int ROWS = 12;
};

// Rows of 16 words to columns.
inline void transpose(__m512i (&x)[16]) {
  __m512i y[16];
  each<4>([&](auto i) {
    const __m512i a = _mm512_unpacklo_epi32(x[4 * i], x[4 * i + 1]),
                  b = _mm512_unpackhi_epi32(x[4 * i], x[4 * i + 1]),
                  c = _mm512_unpacklo_epi32(x[4 * i + 2], x[4 * i + 3]),
                  d = _mm512_unpackhi_epi32(x[4 * i + 2], x[4 * i + 3]);
    y[4 * i] = _mm512_unpacklo_epi64(a, c), y[4 * i + 1] = _mm512_unpackhi_epi64(a, c);
    y[4 * i + 2] = _mm512_unpacklo_epi64(b, d), y[4 * i + 3] = _mm512_unpackhi_epi64(b, d);
  });
  each<4>([&](auto i) {
    const __m512i a = _mm512_shuffle_i32x4(y[i], y[i + 4], 0x88),
                  b = _mm512_shuffle_i32x4(y[i], y[i + 4], 0xdd),
                  c = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0x88),
                  d = _mm512_shuffle_i32x4(y[i + 8], y[i + 12], 0xdd);
    x[i] = _mm512_shuffle_i32x4(a, c, 0x88), x[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    x[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), x[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  });
}

// The same of bf16, 16 keys at once: pairs of numbers are added up in their order.
template <int R, class Slot>
void score(
    const bf16* q, int64_t apart, int64_t D, const Head<bf16>& head, int64_t begin, int64_t end, Slot slot,
    float* s, int64_t stride) {
  for (int64_t j = begin; j < end; j += 16) {
    __m512 sum[R];
    each<R>([&](auto r) { sum[r] = _mm512_setzero_ps(); });
    for (int64_t d = 0; d < D; d += 32) {
      const __mmask32 there = D - d < 32 ? (1u << (D - d)) - 1 : ~0u;
      __m512i keys[16];
      each<16>([&](auto i) {
        const bf16* key = head.keys + slot(std::min<int64_t>(j + i, end - 1)) * head.key_stride;
        _mm_prefetch(key + d + 32 * head.key_stride, _MM_HINT_T0);
        keys[i] = _mm512_maskz_loadu_epi16(there, key + d);
      });
      transpose(keys);
      each<16>([&](auto i) {
        each<R>([&](auto r) {
          int32_t pair;
          std::memcpy(&pair, q + r * apart + d + 2 * i, 4);
          sum[r] = _mm512_dpbf16_ps(sum[r], (__m512bh)keys[i], (__m512bh)_mm512_set1_epi32(pair));
        });
      });
    }
    const __mmask16 there = end - j < 16 ? (1u << (end - j)) - 1 : 0xffff;
    each<R>([&](auto r) { _mm512_mask_storeu_ps(s + r * stride + j, there, sum[r]); });
  }
}

#endif

// Adds the values of the keys [begin, end), which are the same for R rows, to PARTS vectors of each row.
template <int R, int PARTS, bool WHOLE, class T, class Slot>
void add_parts(
    const float* e, int64_t stride, const T* values, int64_t value_stride, int64_t D, int64_t begin,
    int64_t end, Slot slot, float* o, int64_t width) {
  Vec sum[R][PARTS];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PARTS; p++) sum[r][p] = Vec::load(o + r * width + p * W);
#pragma GCC unroll 2
  for (int64_t j = begin; j < end; j++) {
    const T* value = values + slot(j) * value_stride;
    Vec weight[R];
    for (int r = 0; r < R; r++) weight[r] = Vec::set(e[r * stride + j]);
    for (int p = 0; p < PARTS; p++) {
      Vec part = WHOLE || p + 1 < PARTS ? Vec::load(value + p * W) : tail(value + p * W, D - p * W);
      for (int r = 0; r < R; r++) sum[r][p] = fma(weight[r], part, sum[r][p]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PARTS; p++) sum[r][p].store(o + r * width + p * W);
}

template <int R, class T, class Slot>
void add_values(
    const float* e, int64_t stride, const Head<T>& head, int64_t D, int64_t begin, int64_t end, Slot slot,
    float* o, int64_t width) {
  int64_t d = 0;
  auto add = [&](auto parts) {
    auto go = [&](auto whole) {
      add_parts<R, parts, whole>(
          e, stride, head.values + d, head.value_stride, D - d, begin, end, slot, o + d, width);
    };
    if (D - d >= parts * W) go(std::true_type());
    else go(std::false_type());
    d += parts * W;
  };
  while (D - d > 3 * W) add(std::integral_constant<int, 4>());
  if (D - d > 2 * W) add(std::integral_constant<int, 3>());
  else if (D - d > W) add(std::integral_constant<int, 2>());
  else if (D > d) add(std::integral_constant<int, 1>());
}

// Scores [0, n) to weights that are not yet divided by their sum, which is returned. Behind them stand zeros.
float weigh(float* s, int64_t n, float scale, float cap, const float* sink) {
  const int64_t end = padded(n);
  for (int64_t j = 0; j < n; j += W) (Vec::load(s + j) * Vec::set(scale)).store(s + j);
  for (int64_t j = 0; cap > 0 && j < n; j += W) capped(Vec::load(s + j), cap).store(s + j);
  std::fill(s + n, s + end, -std::numeric_limits<float>::infinity());
  Vec highest = Vec::set(sink ? *sink : -std::numeric_limits<float>::infinity());
  for (int64_t j = 0; j < end; j += W) highest = max(highest, Vec::load(s + j));
  float lanes[W];
  highest.store(lanes);
  const float most = *std::max_element(lanes, lanes + W);
  Vec sum[FOUR] = {Vec::set(0), Vec::set(0), Vec::set(0), Vec::set(0)};  // the first is used
  for (int64_t j = 0; j < end; j += W) {
    exponential(Vec::load(s + j) - Vec::set(most)).store(s + j);
    if (j + W > n) std::fill(s + n, s + end, 0.0f);
    sum[0] = sum[0] + Vec::load(s + j);
  }
  if (sink) {
    float alone[W] = {*sink - most};
    exponential(Vec::load(alone)).store(alone);
    std::fill(alone + 1, alone + W, 0.0f);
    sum[0] = sum[0] + Vec::load(alone);
  }
  float total[FOUR];
  sums(sum, total);
  return total[0];
}

constexpr int TILE = 4;   // rows of one text that share the reading of keys
constexpr int NEAR = 64;  // keys that stay in the first cache while all these rows read them

template <class T>
void attend(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, float scale, float cap,
    const float* sinks, Tensor& out) {
  const int64_t B = q.size(0), heads = q.size(1), R = q.size(2), D = q.size(3), KV = k.size(1),
                Dv = v.size(3);
  const int64_t G = heads / KV, width = padded(Dv), L = keys.size(-1), tilesof = (R + TILE - 1) / TILE;
  using Number = typename Scored<T>::Number;
  const int64_t apart = (D + 31) / 32 * 32;
  const Tensor rows = q.to(c10::CppTypeToScalarType<Number>::value).contiguous();
  const int32_t* lists = keys.const_data_ptr<int32_t>();
  T* made = out.data_ptr<T>();  // [B, R, heads, Dv]
  team::parallel_for(B * KV * tilesof, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> scores, sum, total;
    std::vector<Number> query;
    for (int64_t task = begin; task < end; task++) {
      const int64_t b = task / (KV * tilesof), h = task / tilesof % KV, top = task % tilesof * TILE;
      const int64_t n = std::min<int64_t>(TILE, R - top);
      std::vector<Row> read;
      for (int64_t r = 0; r < n; r++) read.emplace_back(lists + (b % keys.size(0) * R + top + r) * L, L);
      // Rows share the text from the latest first key to the earliest last one, and memory if they begin
      // alike.
      int64_t low = 0, high = std::numeric_limits<int64_t>::max(), stride = 0, begin_at = read[0].first;
      bool alike = true;
      for (const Row& row : read) {
        alike &= row.memory == read[0].memory && (row.memory == 0 || row.first == read[0].first);
        begin_at = std::min(begin_at, row.first);
      }
      for (Row& row : read) {
        row.begin = alike ? row.first - begin_at : 0;
        low = std::max(low, row.begin), high = std::min(high, row.begin + row.text);
        stride = std::max(stride, row.begin + padded(row.size));
      }
      if (!alike || low >= high) low = high = 0;
      const int64_t count = n * G;
      scores.resize(count * stride), query.assign(count * apart, Number(0)), sum.assign(count * width, 0);
      for (int64_t i = 0; i < count; i++) {
        const Number* from =
            rows.const_data_ptr<Number>() + ((b * heads + h * G + i % G) * R + top + i / G) * D;
        std::copy(from, from + D, &query[i * apart]);
      }
      const Head<T> head{
          k.const_data_ptr<T>() + b * k.stride(0) + h * k.stride(1),
          v.const_data_ptr<T>() + b * v.stride(0) + h * v.stride(1), k.stride(2), v.stride(2)};
      // Calls f(first row and head, their number, begin, end, where) for all keys, in each row's own order,
      // at most `most` rows at once.
      auto parts = [&](auto most, auto f) {
        auto alone = [&](int64_t from, int64_t to) {
          for (int64_t r = 0; r < n; r++)
            read[r].parts(from, to, [&](int64_t begin, int64_t end, auto slot) {
              even_tiles<most>(G, [&](int64_t g, auto size) { f(r * G + g, size, begin, end, slot); });
            });
        };
        alone(0, low);
        for (int64_t from = low; from < high; from += NEAR)
          read[0].parts(from, std::min(high, from + NEAR), [&](int64_t begin, int64_t end, auto slot) {
            even_tiles<most>(count, [&](int64_t i, auto size) { f(i, size, begin, end, slot); });
          });
        alone(high, stride);
      };
      parts(
          std::integral_constant<int, Scored<T>::ROWS>(),
          [&](int64_t i, auto size, int64_t begin, int64_t end, auto slot) {
            score<size>(&query[i * apart], apart, D, head, begin, end, slot, &scores[i * stride], stride);
          });
      total.resize(count);
      for (int64_t i = 0; i < count; i++)
        total[i] = weigh(
            &scores[i * stride + read[i / G].begin], read[i / G].size, scale, cap,
            sinks ? sinks + h * G + i % G : nullptr);
      parts(
          std::integral_constant<int, ROWS>(),
          [&](int64_t i, auto size, int64_t begin, int64_t end, auto slot) {
            add_values<size>(&scores[i * stride], stride, head, Dv, begin, end, slot, &sum[i * width], width);
          });
      for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < Dv; d++)
          made[((b * R + top + i / G) * heads + h * G + i % G) * Dv + d] = T(sum[i * width + d] / total[i]);
    }
  });
}

// Queries [B, heads, R, D] over keys [B, KV, S, D] and values [B, KV, S, Dv] -> [B, R, heads, Dv].
// keys_of [#B, 1, R, 3 + L], int32: see Row.
Tensor attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys_of, double scale, double cap,
    const std::optional<Tensor>& sinks) {
  const int64_t B = q.size(0), heads = q.size(1), KV = k.size(1);
  TORCH_CHECK(
      q.size(3) == k.size(3) && heads % KV == 0 && k.size(0) == B && v.size(0) == B && v.size(1) == KV &&
          v.size(2) == k.size(2) && (!sinks || sinks->numel() == heads),
      "attention: queries, keys, values and sinks do not fit");
  TORCH_CHECK(
      keys_of.dim() == 4 && (keys_of.size(0) == B || keys_of.size(0) == 1) && keys_of.size(1) == 1 &&
          keys_of.size(2) == q.size(2) && keys_of.size(3) >= 3,
      "attention: each row needs its list of keys");
  TORCH_CHECK(
      k.stride(-1) == 1 && v.stride(-1) == 1,
      "attention: keys and values must be dense in their last dimension");
  TORCH_CHECK(
      k.scalar_type() == v.scalar_type() && q.scalar_type() == k.scalar_type(),
      "attention: one dtype for all");
  Tensor lists = keys_of.contiguous(), sunk;
  if (sinks) sunk = sinks->to(at::kFloat).contiguous();
  const float* s = sinks ? sunk.const_data_ptr<float>() : nullptr;
#if defined(__AMX_BF16__)
  if (k.scalar_type() == at::kBFloat16 && q.size(3) % amx::DEEP == 0 && v.size(3) % amx::DEEP == 0)
    return amx::attention(q, k, v, lists, scale, cap, s);
#endif
  Tensor out = fresh({q.size(0), q.size(2), q.size(1), v.size(3)}, q.scalar_type());
  if (k.scalar_type() == at::kFloat) attend<float>(q, k, v, lists, scale, cap, s, out);
  else attend<bf16>(q, k, v, lists, scale, cap, s, out);
  return out;
}

}  // namespace

#include "decoder.h"

namespace {

int64_t lanes() { return W; }

// bf16 as float32, by the threads that multiply: PyTorch's wait long for one that has no core.
Tensor widened(const Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kBFloat16, "widened: bfloat16 is expected");
  const Tensor from = x.contiguous(), out = fresh(from.sizes(), at::kFloat);
  const bf16* in = from.const_data_ptr<bf16>();
  float* to = out.data_ptr<float>();
  team::parallel_for(from.numel(), 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) to[i] = float(in[i]);
  });
  return out;
}

// A copy of a tensor in huge pages.
Tensor kept(const Tensor& x) { return huge(x.sizes(), x.scalar_type()).copy_(x); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(slipstream, m) {
  m.def("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor keys, float scale, float cap, Tensor? sinks) -> "
      "Tensor");
  m.def("lanes() -> int", &lanes);
  m.def("tiles(Tensor weight) -> Tensor");
  m.def("tiled_linear(Tensor x, Tensor weight, Tensor scales) -> Tensor");
  m.class_<decoder::Decoder>("Decoder")
      .def(torch::init<c10::List<std::optional<Tensor>>, std::vector<int64_t>, std::vector<int64_t>, std::vector<double>>())
      .def("run", &decoder::Decoder::run);
  m.def("widened(Tensor x) -> Tensor");
  m.def("kept(Tensor x) -> Tensor");
  m.def("int8_rows(Tensor tiles, Tensor scales, Tensor which, int K, ScalarType dtype) -> Tensor");
}

TORCH_LIBRARY_IMPL(slipstream, CPU, m) {
  m.impl("linear", &linear);
  m.impl("attention", &attention);
  m.impl("tiled_linear", &tiled::linear);
  m.impl("widened", &widened);
  m.impl("kept", &kept);
  m.impl("int8_rows", &tiled::int8_rows);
  m.impl("packed_linear", &tiled::packed_linear);  // defined in kernels/weight_packing.py
#if defined(__AVX512BF16__)
  m.impl("tiles", &tiled::bf16_tiles);
#endif
}
