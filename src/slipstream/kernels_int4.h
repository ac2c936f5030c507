// Products of weights of 4 bits with rows of 8, in which a row's bits do not depend on its neighbours.
//
// A weight is (q · d + m) · scale: q from 0 to 15, d and m in fp16, of 32 numbers of a column, a group; the
// scale is the column's. Groups of a row are rounded to 8 bits, each by a scale of its own. A group's sum of whole
// numbers is exact. Times the row's scale and d it is added up in fp32, group by group; behind each follows m
// times the sum of the row's rounded numbers. The column's scale comes last.
//
// Weights [N, K] lie as [panels of 32 columns, groups, 10, 64] bytes. Of the ten vectors, four are 16 columns
// by 8 numbers, of which low halves of bytes hold the first 4 and high ones the others; four are the other 16
// columns; one is d and one m of all 32.

#pragma once

#include "kernels_int8.h"

namespace {
namespace int4 {

using at::Tensor;
using bf16 = c10::BFloat16;

constexpr int64_t WIDE = int8::WIDE, MOST = int8::MOST;  // columns of a panel; rows that are multiplied at once
constexpr int64_t GROUP = 32, VECTOR = 64, BYTES = 10 * VECTOR;  // numbers and bytes of a group of a panel

// Rows of whole numbers, with zeros behind. Factors of a group: its scale, and the scale times its sum.
struct Rows {
  int64_t M, groups;
  Tensor memory;
  float* factors;
  int8_t* numbers;
  Rows(int64_t M, int64_t K)
      : M(M), groups((K + GROUP - 1) / GROUP), memory(at::empty({M * groups * (GROUP + 8)}, at::kChar)),
        factors(static_cast<float*>(memory.data_ptr())),
        numbers(reinterpret_cast<int8_t*>(factors + M * groups * 2)) {}
  int64_t stride() const { return groups * GROUP; }
};

template <class T>
Rows rounded(const T* x, int64_t M, int64_t K) {
  Rows made(M, K);
  at::parallel_for(0, M, std::max<int64_t>(1, 32768 / made.stride()), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * made.groups; i < end * made.groups; i++) {
      const int64_t m = i / made.groups, k = i % made.groups * GROUP, n = std::min(K - k, GROUP);
      int8_t* to = made.numbers + i * GROUP;
      std::fill(to + n, to + GROUP, 0);
      const float scale = int8::quantise(x + m * K + k, n, to);
      int32_t sum = 0;
      for (int64_t j = 0; j < GROUP; j++) sum += to[j];
      made.factors[2 * i] = scale, made.factors[2 * i + 1] = scale * sum;
    }
  });
  return made;
}

#if defined(__AVX512VNNI__)

// The products of R rows with a panel.
template <int R>
[[gnu::noinline]] void add_up(
    const int8_t* x, int64_t stride, const float* factors, const uint8_t* w, int64_t groups, float* out) {
  __m512 total[R][2];
  const __m512i low = _mm512_set1_epi8(15);
  each<R>([&](auto r) { total[r][0] = total[r][1] = _mm512_setzero_ps(); });
  for (int64_t g = 0; g < groups; g++, x += GROUP, w += BYTES) {
    __m512i sum[R][2];
    each<R>([&](auto r) { sum[r][0] = sum[r][1] = _mm512_setzero_si512(); });
    each<4>([&](auto v) {
      const __m512i left = _mm512_loadu_si512(w + v * VECTOR), right = _mm512_loadu_si512(w + (v + 4) * VECTOR);
      const __m512i columns[2][2] = {
          {_mm512_and_si512(left, low), _mm512_and_si512(right, low)},
          {_mm512_and_si512(_mm512_srli_epi16(left, 4), low),
           _mm512_and_si512(_mm512_srli_epi16(right, 4), low)}};
      each<2>([&](auto half) {
        each<R>([&](auto r) {
          int32_t four;
          std::memcpy(&four, x + r * stride + v * 8 + half * 4, 4);
          const __m512i row = _mm512_set1_epi32(four);
          sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], columns[half][0], row);
          sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], columns[half][1], row);
        });
      });
    });
    each<2>([&](auto side) {
      const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(w + 8 * VECTOR + side * 32))),
                   m = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(w + 9 * VECTOR + side * 32)));
      each<R>([&](auto r) {
        const float* of = factors + (r * groups + g) * 2;
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r][side]), _mm512_set1_ps(of[0]));
        total[r][side] = _mm512_fmadd_ps(scaled, d, total[r][side]);
        total[r][side] = _mm512_fmadd_ps(_mm512_set1_ps(of[1]), m, total[r][side]);
      });
    });
  }
  each<R>([&](auto r) {
    _mm512_storeu_ps(out + r * WIDE, total[r][0]);
    _mm512_storeu_ps(out + r * WIDE + 16, total[r][1]);
  });
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

// Sums by pairs of 16 bits: at most 16 · 127 · 15. Eight columns at a time.
template <int R>
[[gnu::noinline]] void add_up(
    const int8_t* x, int64_t stride, const float* factors, const uint8_t* w, int64_t groups, float* out) {
  const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  for (int64_t n = 0; n < WIDE; n += 8) {
    __m256 total[R];
    each<R>([&](auto r) { total[r] = _mm256_setzero_ps(); });
    for (int64_t g = 0; g < groups; g++) {
      const uint8_t *group = w + g * BYTES, *columns = group + n / 16 * 4 * VECTOR + n % 16 * 4;
      __m256i sum[R];
      each<R>([&](auto r) { sum[r] = _mm256_setzero_si256(); });
      each<8>([&](auto i) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)(columns + i / 2 * VECTOR)),
                      four = _mm256_and_si256(i % 2 ? _mm256_srli_epi16(both, 4) : both, low);
        each<R>([&](auto r) {
          int32_t row;
          std::memcpy(&row, x + r * stride + g * GROUP + i * 4, 4);
          sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(four, _mm256_set1_epi32(row)));
        });
      });
      const __m128i* halves = (const __m128i*)(group + 8 * VECTOR + n * 2);
      const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128(halves)),
                   m = _mm256_cvtph_ps(_mm_loadu_si128(halves + 4));
      each<R>([&](auto r) {
        const float* of = factors + (r * groups + g) * 2;
        const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r], one));
        total[r] = _mm256_fmadd_ps(_mm256_mul_ps(whole, _mm256_set1_ps(of[0])), d, total[r]);
        total[r] = _mm256_fmadd_ps(_mm256_set1_ps(of[1]), m, total[r]);
      });
    }
    each<R>([&](auto r) { _mm256_storeu_ps(out + r * WIDE + n, total[r]); });
  }
}

#else

template <int R>
void add_up(
    const int8_t* x, int64_t stride, const float* factors, const uint8_t* w, int64_t groups, float* out) {
  std::fill(out, out + R * WIDE, 0.0f);
  for (int64_t g = 0; g < groups; g++, x += GROUP, w += BYTES) {
    const at::Half* halves = reinterpret_cast<const at::Half*>(w + 8 * VECTOR);
    for (int64_t r = 0; r < R; r++)
      for (int64_t n = 0; n < WIDE; n++) {
        int32_t sum = 0;
        for (int64_t k = 0; k < GROUP; k++) {
          const int32_t both = w[(n / 16 * 4 + k / 8) * VECTOR + n % 16 * 4 + k % 4];
          sum += (both >> k / 4 % 2 * 4 & 15) * x[r * stride + k];
        }
        const float* of = factors + (r * groups + g) * 2;
        float& total = out[r * WIDE + n];
        total = std::fma(float(sum) * of[0], float(halves[n]), total);
        total = std::fma(of[1], float(halves[WIDE + n]), total);
      }
  }
}

#endif

#if defined(__AMX_INT8__)

constexpr int64_t FEW = 8;  // rows that vectors multiply sooner than tiles do
constexpr int STEPS = 4;    // groups whose sums are taken from tiles at once
using Columns = uint8_t[STEPS][16][VECTOR];  // tiles of 4 by 16 numbers of two sides, a byte each

inline void unpack(const uint8_t* w, int64_t steps, Columns& to) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t g = 0; g < steps; g++, w += BYTES)
    each<8>([&](auto v) {
      const __m512i both = _mm512_loadu_si512(w + v * VECTOR);
      _mm512_store_si512(to[g][2 * v], _mm512_and_si512(both, low));
      _mm512_store_si512(to[g][2 * v + 1], _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
    });
}

// Tiles for n rows: their sums in 0 to 3, rows in 4 and 5, columns in 6 and 7.
inline void configure(int64_t n) {
  alignas(64) struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  const int64_t first = std::min(n, amx::SIDE), second = std::max<int64_t>(n - amx::SIDE, 1);
  for (int i = 0; i < 8; i++) config.bytes[i] = i == 4 || i == 5 ? GROUP : VECTOR;
  for (int i = 0; i < 8; i++) config.rows[i] = i > 5 ? 8 : i == 2 || i == 3 || i == 5 ? second : first;
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}
inline void release() { _tile_release(); }

// The sums of a group: of the configured rows x, more than 16 with MORE, with 32 columns.
template <bool MORE>
void add_up(const int8_t* x, int64_t stride, const uint8_t (&columns)[16][VECTOR], int32_t* sums) {
  constexpr int64_t bytes = WIDE * 4;
  _tile_zero(0);
  _tile_zero(1);
  _tile_loadd(4, x, stride);
  _tile_loadd(6, columns[0], VECTOR);
  _tile_loadd(7, columns[8], VECTOR);
  _tile_dpbsud(0, 4, 6);
  _tile_dpbsud(1, 4, 7);
  if constexpr (MORE) {
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(5, x + amx::SIDE * stride, stride);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + 16, bytes);
  if constexpr (MORE) {
    _tile_stored(2, sums + amx::SIDE * WIDE, bytes);
    _tile_stored(3, sums + amx::SIDE * WIDE + 16, bytes);
  }
}

// Adds the sums of G groups.
template <int G>
void add_groups(
    const int32_t (&of)[STEPS][MOST][WIDE], const float* factors, int64_t groups, int64_t n, const uint8_t* w,
    bool first, float* out) {
  for (int64_t side = 0; side < WIDE; side += 16) {
    __m512 d[G], m[G];
    each<G>([&](auto g) {
      const __m256i* halves = (const __m256i*)(w + g * BYTES + 8 * VECTOR + side * 2);
      d[g] = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
      m[g] = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 2));
    });
    for (int64_t r = 0; r < n; r++) {
      __m512 total = first ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * WIDE + side);
      each<G>([&](auto g) {
        const float* by = factors + (r * groups + g) * 2;
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(&of[g][r][side]));
        total = _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(by[0])), d[g], total);
        total = _mm512_fmadd_ps(_mm512_set1_ps(by[1]), m[g], total);
      });
      _mm512_storeu_ps(out + r * WIDE + side, total);
    }
  }
}

template <bool MORE>
void by_tiles(const Rows& x, int64_t from, int64_t n, const uint8_t* w, float* out) {
  alignas(64) Columns columns;
  alignas(64) int32_t sums[STEPS][MOST][WIDE];
  const int8_t* rows = x.numbers + from * x.stride();
  unpack(w, std::min<int64_t>(x.groups, STEPS), columns);
  tiles<STEPS>(x.groups, [&](int64_t g, auto count) {
    amx::written();
    for (int i = 0; i < count; i++) add_up<MORE>(rows + (g + i) * GROUP, x.stride(), columns[i], sums[i][0]);
    const int64_t next = g + count;  // tiles wait for what was just stored: other work stands between
    unpack(w + next * BYTES, std::min<int64_t>(x.groups - next, STEPS), columns);
    add_groups<count>(sums, x.factors + (from * x.groups + g) * 2, x.groups, n, w + g * BYTES, g == 0, out);
  });
}

#else

constexpr int64_t FEW = MOST;
inline void configure(int64_t) {}
inline void release() {}

#endif

// The products of n <= MOST rows, from the m-th on, with a panel: [n, WIDE], without the columns' scales. More
// than FEW take `configure(n)` before it.
inline void multiply(const Rows& x, int64_t m, int64_t n, const uint8_t* w, float* out) {
#if defined(__AMX_INT8__)
  if (n > FEW) return n > amx::SIDE ? by_tiles<true>(x, m, n, w, out) : by_tiles<false>(x, m, n, w, out);
#endif
  tiles(n, [&](int64_t r, auto rows) {
    add_up<rows>(
        x.numbers + (m + r) * x.stride(), x.stride(), x.factors + (m + r) * x.groups * 2, w, x.groups,
        out + r * WIDE);
  });
}

template <class T>
void linear_into(const Rows& x, const uint8_t* weight, const Tensor& scales, T* out) {
  const int64_t N = scales.numel();
  const int64_t part = std::max<int64_t>(MOST, (1 << 20) / x.stride() / MOST * MOST);  // in the second cache
  const int64_t grain = std::max<int64_t>(1, 65536 / (x.stride() * std::max<int64_t>(x.M, 16)));
  at::parallel_for(0, (N + WIDE - 1) / WIDE, grain, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[MOST * WIDE];
    int64_t set = 0;
    for (int64_t top = 0; top < x.M; top += part)
      for (int64_t p = begin; p < end; p++)
        for (int64_t m = top; m < std::min(x.M, top + part); m += MOST) {
          const int64_t here = std::min(std::min(x.M, top + part) - m, MOST), n = std::min(N - p * WIDE, WIDE);
          if (here > FEW && here != set) configure(here), set = here;
          multiply(x, m, here, weight + p * x.groups * BYTES, sums);
          for (int64_t r = 0; r < here; r++) {
            float made[WIDE];
            int8::scaled(sums + r * WIDE, n, 1, scales.const_data_ptr<float>() + p * WIDE, made);
            int8::store<T>(made, n, nullptr, out + (m + r) * N + p * WIDE);
          }
        }
    if (set) release();
  });
}

// x [..., K] times a weight that `kernels.int4_tiles` packed. Scales: float32, of its columns.
Tensor linear(const Tensor& x, const Tensor& weight, const Tensor& scales) {
  const int64_t K = x.size(-1), M = x.numel() / std::max<int64_t>(K, 1);
  TORCH_CHECK(
      x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
      "products of 4 bits: float32 or bfloat16 is expected");
  TORCH_CHECK(
      weight.dim() == 4 && weight.scalar_type() == at::kByte && weight.is_contiguous() &&
          scales.scalar_type() == at::kFloat && scales.is_contiguous() &&
          weight.size(0) == (scales.numel() + WIDE - 1) / WIDE && weight.size(1) == (K + GROUP - 1) / GROUP &&
          weight.size(2) * weight.size(3) == BYTES,
      "products of 4 bits: rows, weight and scales do not fit");
#if defined(__AMX_INT8__)
  at::cpu::init_amx();
#endif
  auto sizes = x.sizes().vec();
  sizes.back() = scales.numel();
  const Tensor rows = x.contiguous(), out = at::empty(sizes, x.options());
  if (M == 0) return out;
  auto run = [&](auto like) {
    using T = decltype(like);
    linear_into<T>(
        rounded(rows.const_data_ptr<T>(), M, K), weight.const_data_ptr<uint8_t>(), scales, out.data_ptr<T>());
  };
  if (x.scalar_type() == at::kFloat) run(0.0f);
  else run(bf16());
  return out;
}

}  // namespace int4
}  // namespace
