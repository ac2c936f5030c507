// Products with weights of 4 bits: a kind of weight in tiles.
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

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {
namespace tiled {

struct Int4 {
  using Number = uint8_t;
  using Stored = uint8_t;
  using Sum = float;
  static constexpr int64_t GROUP = 32, VECTOR = 64, STEP = 10 * VECTOR;  // numbers, bytes, bytes of a panel's group
  static constexpr int64_t ROW = GROUP + 8;  // bytes of a row's group: behind all numbers, two factors of each

  static int64_t stride(int64_t K) { return (K + GROUP - 1) / GROUP * ROW; }
  static constexpr int64_t panel(int64_t stride) { return stride * (STEP / ROW); }

  // Whole numbers, with zeros behind, and of each group its scale, and the scale times its sum.
  template <class T>
  static float row(const T* x, int64_t K, uint8_t* to) {
    const int64_t groups = (K + GROUP - 1) / GROUP;
    for (int64_t g = 0; g < groups; g++) {
      int8_t* numbers = reinterpret_cast<int8_t*>(to) + g * GROUP;
      const int64_t n = std::min(K - g * GROUP, GROUP);
      std::fill(numbers + n, numbers + GROUP, 0);
      const float scale = quantise(x + g * GROUP, n, numbers);
      int32_t sum = 0;
      for (int64_t k = 0; k < GROUP; k++) sum += numbers[k];
      const float factors[2] = {scale, scale * sum};
      std::memcpy(to + groups * GROUP + g * 8, factors, sizeof factors);
    }
    return 1;
  }
};

namespace int4 {

constexpr int64_t GROUP = Int4::GROUP, VECTOR = Int4::VECTOR, STEP = Int4::STEP;

// The two factors of a row's group.
inline const float* factors_of(const uint8_t* row, int64_t groups, int64_t g) {
  return reinterpret_cast<const float*>(row + groups * GROUP) + 2 * g;
}

#if defined(__AVX512VNNI__)

// Adds the products of R rows with groups `from` to `to` of a panel, 16 columns at a time. The first are not added
// to anything. With each group and 16 columns it asks for `bytes` of what is read later.
template <int R>
[[gnu::noinline]] void add_up(
    const uint8_t* x, int64_t stride, const uint8_t* w, int64_t groups, int64_t from, int64_t to,
    const uint8_t* later, int64_t bytes, float* out) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t side = 0; side < 2; side++) {
    __m512 total[R];
    each<R>([&](auto r) { total[r] = from ? _mm512_loadu_ps(out + r * WIDE + side * 16) : _mm512_setzero_ps(); });
    for (int64_t g = from; g < to; g++) {
      const uint8_t *group = w + g * STEP, *columns = group + side * 4 * VECTOR;
      ask_for(later, bytes), later += bytes;
      __m512i sum[R];
      each<R>([&](auto r) { sum[r] = _mm512_setzero_si512(); });
      each<4>([&](auto v) {
        const __m512i both = _mm512_loadu_si512(columns + v * VECTOR),
                      fours[2] = {_mm512_and_si512(both, low), _mm512_and_si512(_mm512_srli_epi16(both, 4), low)};
        each<2>([&](auto half) {
          each<R>([&](auto r) {
            int32_t four;
            std::memcpy(&four, x + r * stride + g * GROUP + v * 8 + half * 4, 4);
            sum[r] = _mm512_dpbusd_epi32(sum[r], fours[half], _mm512_set1_epi32(four));
          });
        });
      });
      const __m256i* halves = (const __m256i*)(group + 8 * VECTOR + side * 32);
      const __m512 d = _mm512_cvtph_ps(_mm256_loadu_si256(halves)),
                   m = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 2));
      each<R>([&](auto r) {
        const float* of = factors_of(x + r * stride, groups, g);
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sum[r]), _mm512_set1_ps(of[0]));
        total[r] = _mm512_fmadd_ps(scaled, d, total[r]);
        total[r] = _mm512_fmadd_ps(_mm512_set1_ps(of[1]), m, total[r]);
      });
    }
    each<R>([&](auto r) { _mm512_storeu_ps(out + r * WIDE + side * 16, total[r]); });
  }
}

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

// Sums by pairs of 16 bits: at most 16 · 127 · 15. Eight columns at a time.
template <int R>
[[gnu::noinline]] void add_up(
    const uint8_t* x, int64_t stride, const uint8_t* w, int64_t groups, int64_t from, int64_t to,
    const uint8_t* later, int64_t bytes, float* out) {
  const __m256i low = _mm256_set1_epi8(15), one = _mm256_set1_epi16(1);
  for (int64_t n = 0; n < WIDE; n += 8) {
    __m256 total[R];
    each<R>([&](auto r) { total[r] = from ? _mm256_loadu_ps(out + r * WIDE + n) : _mm256_setzero_ps(); });
    for (int64_t g = from; g < to; g++) {
      const uint8_t *group = w + g * STEP, *columns = group + n / 16 * 4 * VECTOR + n % 16 * 4;
      ask_for(later, bytes / 2), later += bytes / 2;
      __m256i sum[R];
      each<R>([&](auto r) { sum[r] = _mm256_setzero_si256(); });
#pragma GCC unroll 2
      for (int64_t v = 0; v < 4; v++) {
        const __m256i both = _mm256_loadu_si256((const __m256i*)(columns + v * VECTOR)),
                      fours[2] = {_mm256_and_si256(both, low), _mm256_and_si256(_mm256_srli_epi16(both, 4), low)};
        each<2>([&](auto half) {
          each<R>([&](auto r) {
            const __m256i row = _mm256_broadcastd_epi32(_mm_loadu_si32(x + r * stride + g * GROUP + v * 8 + half * 4));
            sum[r] = _mm256_add_epi16(sum[r], _mm256_maddubs_epi16(fours[half], row));
          });
        });
      }
      const __m128i* halves = (const __m128i*)(group + 8 * VECTOR + n * 2);
      const __m256 d = _mm256_cvtph_ps(_mm_loadu_si128(halves)),
                   m = _mm256_cvtph_ps(_mm_loadu_si128(halves + 4));
      each<R>([&](auto r) {
        const float* of = factors_of(x + r * stride, groups, g);
        const __m256 whole = _mm256_cvtepi32_ps(_mm256_madd_epi16(sum[r], one));
        total[r] = _mm256_fmadd_ps(_mm256_mul_ps(whole, _mm256_broadcast_ss(of)), d, total[r]);
        total[r] = _mm256_fmadd_ps(_mm256_broadcast_ss(of + 1), m, total[r]);
      });
    }
    each<R>([&](auto r) { _mm256_storeu_ps(out + r * WIDE + n, total[r]); });
  }
}

#else

template <int R>
void add_up(
    const uint8_t* x, int64_t stride, const uint8_t* w, int64_t groups, int64_t from, int64_t to, const uint8_t*,
    int64_t, float* out) {
  if (from == 0) std::fill(out, out + R * WIDE, 0.0f);
  for (int64_t g = from; g < to; g++) {
    const uint8_t* group = w + g * STEP;
    const at::Half* halves = reinterpret_cast<const at::Half*>(group + 8 * VECTOR);
    for (int64_t r = 0; r < R; r++)
      for (int64_t n = 0; n < WIDE; n++) {
        int32_t sum = 0;
        for (int64_t k = 0; k < GROUP; k++) {
          const int32_t both = group[(n / 16 * 4 + k / 8) * VECTOR + n % 16 * 4 + k % 4];
          sum += (both >> k / 4 % 2 * 4 & 15) * int8_t(x[r * stride + g * GROUP + k]);
        }
        const float* of = factors_of(x + r * stride, groups, g);
        float& total = out[r * WIDE + n];
        total = std::fma(float(sum) * of[0], float(halves[n]), total);
        total = std::fma(of[1], float(halves[WIDE + n]), total);
      }
  }
}

#endif

#if defined(__AMX_INT8__)

constexpr int64_t FEW = 8;  // rows that vectors multiply sooner than tiles do
constexpr int AT_ONCE = 4;   // groups whose sums are taken from tiles at once
using Columns = uint8_t[AT_ONCE][16][VECTOR];  // tiles of 4 by 16 numbers of two sides, a byte each

inline void unpack(const uint8_t* w, int64_t steps, Columns& to) {
  const __m512i low = _mm512_set1_epi8(15);
  for (int64_t g = 0; g < steps; g++, w += STEP)
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

// The sums of a group: of the configured rows x, more than 16 with MORE, with 32 columns.
template <bool MORE>
void add_up(const uint8_t* x, int64_t stride, const uint8_t (&columns)[16][VECTOR], int32_t* sums) {
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
    const int32_t (&of)[AT_ONCE][MOST][WIDE], const uint8_t* rows, int64_t stride, int64_t groups, int64_t at, int64_t n,
    const uint8_t* w,
    float* out) {
  for (int64_t side = 0; side < WIDE; side += 16) {
    __m512 d[G], m[G];
    each<G>([&](auto g) {
      const __m256i* halves = (const __m256i*)(w + g * STEP + 8 * VECTOR + side * 2);
      d[g] = _mm512_cvtph_ps(_mm256_loadu_si256(halves));
      m[g] = _mm512_cvtph_ps(_mm256_loadu_si256(halves + 2));
    });
    for (int64_t r = 0; r < n; r++) {
      __m512 total = at == 0 ? _mm512_setzero_ps() : _mm512_loadu_ps(out + r * WIDE + side);
      each<G>([&](auto g) {
        const float* by = factors_of(rows + r * stride, groups, at + g);
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_loadu_si512(&of[g][r][side]));
        total = _mm512_fmadd_ps(_mm512_mul_ps(sum, _mm512_set1_ps(by[0])), d[g], total);
        total = _mm512_fmadd_ps(_mm512_set1_ps(by[1]), m[g], total);
      });
      _mm512_storeu_ps(out + r * WIDE + side, total);
    }
  }
}

template <bool MORE>
void by_tiles(const uint8_t* x, int64_t stride, int64_t n, const uint8_t* w, int64_t groups, float* out) {
  alignas(64) Columns columns;
  alignas(64) int32_t sums[AT_ONCE][MOST][WIDE];
  unpack(w, std::min<int64_t>(groups, AT_ONCE), columns);
  tiles<AT_ONCE>(groups, [&](int64_t g, auto count) {
    amx::written();
    for (int i = 0; i < count; i++) add_up<MORE>(x + (g + i) * GROUP, stride, columns[i], sums[i][0]);
    const int64_t next = g + count;  // tiles wait for what was just stored: other work stands between
    unpack(w + next * STEP, std::min<int64_t>(groups - next, AT_ONCE), columns);
    add_groups<count>(sums, x, stride, groups, g, n, w + g * STEP, out);
  });
}

#else

constexpr int64_t FEW = MOST;

#endif

// The products of n <= MOST rows, `stride` bytes apart, with a panel, without the columns' scales. More than
// FEW take `configure(n)` before it.
inline void multiply(
    const uint8_t* x, int64_t n, int64_t stride, const uint8_t* w, int64_t groups, float* out) {
#if defined(__AMX_INT8__)
  if (n > FEW)
    return n > amx::SIDE ? by_tiles<true>(x, stride, n, w, groups, out)
                         : by_tiles<false>(x, stride, n, w, groups, out);
#endif
  constexpr int64_t NEAR = 16;  // groups that the first cache holds; those after the next ones are asked for
  const int64_t share = STEP / 2 / parts_of<TOGETHER<uint8_t>>(n);
  for (int64_t g = 0; g < groups; g += NEAR) {
    const uint8_t* later = w + (g + 2 * NEAR) * STEP;
    even_tiles<TOGETHER<uint8_t>>(n, [&](int64_t r, auto rows) {
      add_up<rows>(
          x + r * stride, stride, w, groups, g, std::min(groups, g + NEAR), later, share, out + r * WIDE);
      later += 2 * NEAR * share;
    });
  }
}

}  // namespace int4
}  // namespace tiled
}  // namespace
