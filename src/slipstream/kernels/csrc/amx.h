// Products by AMX tiles and bf16 attention with them, in which a row's bits do not depend on its neighbours.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds to 16 × 16 sums, in fp32, the products of
// 16 rows of 32 numbers with 16 columns of 32 numbers: first the even ones and the odd ones each in their
// order, then the two together. So the order of a sum depends on where its numbers stand in blocks of 32, and
// on nothing else.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cpu/Utils.h>
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

namespace amx {

using at::Tensor;
using bf16 = c10::BFloat16;

constexpr int64_t SIDE = 16;     // rows of a tile, and columns of sums
constexpr int64_t DEEP = 32;     // numbers of a row that one instruction multiplies
constexpr int64_t AHEAD = 1024;  // bytes of weights that are asked for before they are needed

// The compiler does not know what tile instructions read: what was written before must be in memory.
inline void written() { asm volatile("" ::: "memory"); }

// Sums of `rows` rows in registers 0 and 1 (and of `more` in 2 and 3), the rows in 4 (and 5), columns in 6
// and 7.
inline void configure(int64_t rows, int64_t more = 0) {
  alignas(64) struct {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  } config;
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = SIDE;
  for (int i : {0, 1, 4}) config.rows[i] = rows;
  for (int i : {2, 3, 5}) config.rows[i] = std::max<int64_t>(more, 1);
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// The products of the configured rows x, in bf16 or int8, with 32 columns: `steps` pairs of tiles in their
// order. `stride`: bytes from row to row. FIRST: the weights come from far.
template <bool MORE, bool FIRST, class T>
inline void multiply(const T* x, int64_t stride, const T* columns, int64_t steps, void* sums) {
  constexpr bool whole = std::is_same_v<T, int8_t>;
  const char *rows = reinterpret_cast<const char*>(x), *tile = reinterpret_cast<const char*>(columns);
  char* to = static_cast<char*>(sums);
  written();
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (MORE) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < steps; k++, rows += 64, tile += 2 * SIDE * 64) {
    if constexpr (FIRST)
      for (int64_t i = 0; i < 2 * SIDE * 64; i += 64) _mm_prefetch(tile + AHEAD + i, _MM_HINT_T1);
    _tile_loadd(4, rows, stride);
    _tile_loadd(6, tile, 64);
    _tile_loadd(7, tile + SIDE * 64, 64);
    if constexpr (whole) {
      _tile_dpbssd(0, 4, 6);
      _tile_dpbssd(1, 4, 7);
    } else {
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (MORE) {
      _tile_loadd(5, rows + SIDE * stride, stride);
      if constexpr (whole) {
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
      } else {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  constexpr int64_t bytes = 2 * SIDE * 4;
  _tile_stored(0, to, bytes);
  _tile_stored(1, to + bytes / 2, bytes);
  if constexpr (MORE) {
    _tile_stored(2, to + SIDE * bytes, bytes);
    _tile_stored(3, to + SIDE * bytes + bytes / 2, bytes);
  }
}

// Attention. The keys of a row have numbers: in the text their positions, then its listed ones go on. A block
// is 32 numbers, which one instruction adds up, so that a key has one place in the sums wherever it is stored
// and whoever else reads it. Memory has blocks of its own, before those of the text.

using Words = __m512i[16];

// Columns for rows, of 16 × 16 words of 32 bits.
inline void turn(const Words& in, Words& out) {
  Words a, b;
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2)
    a[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]), a[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // lane l of b[4 g + i] has column 4 l + i of the rows 4 g to 4 g + 3
    const __m512i low = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88),
                  high = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    const __m512i low_odd = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd),
                  high_odd = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    out[i] = _mm512_shuffle_i32x4(low, high, 0x88), out[8 + i] = _mm512_shuffle_i32x4(low, high, 0xdd);
    out[4 + i] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88),
            out[12 + i] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
  }
}

// The keys and values of one text and one head.
struct Head {
  const bf16 *keys, *values;
  int64_t key_stride, value_stride, slots;
};

// Which of the 64 numbers of two rows stand where in rows of 16 pairs.
struct Pairs {
  alignas(64) uint16_t of[2][DEEP] = {};
  constexpr Pairs() {
    for (int i = 0; i < DEEP; i++)
      for (int half = 0; half < 2; half++) of[half][i] = i / 2 + SIDE * half + i % 2 * DEEP;
  }
};
inline constexpr Pairs PAIRS;

// What a row reads: `memory` keys at the first slots; of the text the positions [first, end), of which the
// first stands at slot `origin`; listed slots, whose numbers go on to `size`. Those before `shared` are read
// together with other rows.
struct Reads {
  int64_t memory, origin, first, end, shared, size;
  const int32_t* list;
  Reads(const int32_t* keys, int64_t width)
      : memory(std::max(keys[0], 0)),
        origin(std::abs(keys[0])),
        first(keys[1] - origin),
        end(keys[2] - origin),
        size(end),
        list(keys + 3) {
    while (size - end < width - 3 && list[size - end] >= 0) size++;
    shared = size > end ? end / DEEP * DEEP : end;
  }
  int64_t slot(int64_t number) const { return number < end ? origin + number : list[number - end]; }
};

// A block of keys that one row alone reads.
struct Block {
  int64_t tile;
  __mmask16 queries;  // columns of the tile
  bool memory;
  float* scores;  // [32 keys][16 queries]
  bf16* values;   // tiles of 16 columns
};

// The attention of up to 32 queries of one text and one head of keys.
class Job {
 public:
  int64_t D, Dv;
  float scale, cap;
  Head head;
  std::vector<Reads> rows;
  int64_t queries;  // of a row, at most 16
  std::vector<const bf16*> q;
  std::vector<bf16*> out;    // [rows][queries]
  std::vector<float> sinks;  // one for each query of a row, or none

  void run() {
    per = SIDE / queries, tiles = (rows.size() + per - 1) / per, alone.clear();
    pack_queries();
    tiles > 1 ? read<true>() : read<false>();
    weigh();
    tiles > 1 ? add<true>() : add<false>();
    write();
  }

 private:
  int64_t per, tiles, low, blocks;  // rows of a tile; the first number and the blocks that rows share
  std::vector<bf16> packed, weights, values, gathered, lone_values;
  std::vector<float> scores, lone_scores, sums;
  std::vector<Block> alone;
  __m512 most[2], total[2];

  __mmask16 columns(int64_t r) const { return ((1u << queries) - 1) << r % per * queries; }

  void pack_queries() {
    packed.resize(2 * SIDE * D);
    for (int64_t t = 0; t < tiles; t++)
      for (int64_t k = 0; k < D; k += DEEP) {
        Words in, turned;
        for (int64_t i = 0; i < SIDE; i++) {
          const int64_t at = t * per * queries + i;
          const bool there = i < per * queries && at < int64_t(q.size());
          in[i] = there ? _mm512_loadu_si512(q[at] + k) : _mm512_setzero_si512();
        }
        turn(in, turned);
        for (int64_t i = 0; i < SIDE; i++)
          _mm512_storeu_si512(&packed[(t * D + k) * SIDE + i * DEEP], turned[i]);
      }
  }

  // Scores [32 keys][16 queries] of tile t and, with BOTH, of the next, behind them.
  template <bool BOTH>
  void score(const bf16* keys, int64_t stride, int64_t t, float* to) const {
    const bf16* columns = &packed[t * D * SIDE];
    written();
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BOTH) {
      _tile_zero(2);
      _tile_zero(3);
    }
    for (int64_t k = 0; k < D; k += DEEP) {
      _tile_loadd(4, keys + k, stride * 2);
      _tile_loadd(5, keys + SIDE * stride + k, stride * 2);
      _tile_loadd(6, columns + k * SIDE, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 5, 6);
      if constexpr (BOTH) {
        _tile_loadd(7, columns + (D + k) * SIDE, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to, 64);
    _tile_stored(1, to + SIDE * SIDE, 64);
    if constexpr (BOTH) {
      _tile_stored(2, to + 2 * SIDE * SIDE, 64);
      _tile_stored(3, to + 3 * SIDE * SIDE, 64);
    }
  }

  // Two rows of values, either may be missing, as rows of pairs in tiles of 16 columns.
  void interleave(const bf16* even, const bf16* odd, int64_t pair, bf16* to) const {
    for (int64_t d = 0; d < Dv; d += 2 * SIDE) {
      const __m512i a = even ? _mm512_loadu_si512(even + d) : _mm512_setzero_si512();
      const __m512i b = odd ? _mm512_loadu_si512(odd + d) : _mm512_setzero_si512();
      for (int half = 0; half < 2; half++)
        _mm512_storeu_si512(
            to + (d + SIDE * half + pair) * DEEP,
            _mm512_permutex2var_epi16(a, _mm512_load_si512(PAIRS.of[half]), b));
    }
  }

  // Scores and values of all blocks.
  template <bool BOTH>
  void read() {
    int64_t high = 0, all_first = 0, all_end = std::numeric_limits<int64_t>::max(), lone = 0;
    low = std::numeric_limits<int64_t>::max();
    alignas(64) int32_t first[2][SIDE] = {}, end[2][SIDE] = {};
    for (size_t r = 0; r < rows.size(); r++) {
      const Reads& row = rows[r];
      low = std::min(low, row.first / DEEP * DEEP), high = std::max(high, row.shared);
      all_first = std::max(all_first, row.first), all_end = std::min(all_end, row.shared);
      for (int64_t i = 0; i < queries; i++)
        first[r / per][r % per * queries + i] = row.first, end[r / per][r % per * queries + i] = row.shared;
      lone += (row.memory + DEEP - 1) / DEEP + (row.size - row.shared + DEEP - 1) / DEEP;
    }
    blocks = std::max<int64_t>(0, (high - low + DEEP - 1) / DEEP);
    scores.resize(blocks * tiles * DEEP * SIDE), values.resize(blocks * Dv * DEEP), gathered.resize(DEEP * D);
    const int64_t origin = rows[0].origin;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t begin = low + block * DEEP, count = std::min(DEEP, high - begin);
      const bf16* keys = head.keys + (origin + begin) * head.key_stride;
      const bf16* value = head.values + (origin + begin) * head.value_stride;
      float* to = &scores[block * tiles * DEEP * SIDE];
      if (block + 2 < blocks)  // they come from far: the weights of a layer have passed since they were read
        for (int64_t i = 2 * DEEP; i < 3 * DEEP; i++) {
          for (int64_t d = 0; d < D; d += DEEP) _mm_prefetch(keys + i * head.key_stride + d, _MM_HINT_T0);
          for (int64_t d = 0; d < Dv; d += DEEP) _mm_prefetch(value + i * head.value_stride + d, _MM_HINT_T0);
        }
      if (origin + begin + DEEP <= head.slots) score<BOTH>(keys, head.key_stride, 0, to);
      else {
        for (int64_t i = 0; i < count; i++) std::copy_n(keys + i * head.key_stride, D, &gathered[i * D]);
        std::fill(&gathered[count * D], gathered.data() + DEEP * D, bf16(0));
        score<BOTH>(gathered.data(), D, 0, to);
      }
      uint32_t wanted = ~0u;  // which keys of the block anybody reads; the others may hold anything
      if (begin < all_first || begin + DEEP > all_end) {
        wanted = 0;
        for (const Reads& row : rows)
          for (int64_t n = std::max(begin, row.first); n < std::min(begin + DEEP, row.shared); n++)
            wanted |= 1u << (n - begin);
        for (int64_t t = 0; t < tiles; t++)
          for (int64_t i = 0; i < DEEP; i++) {
            const __m512i number = _mm512_set1_epi32(begin + i);
            const __mmask16 apart = _mm512_cmplt_epi32_mask(number, _mm512_load_si512(first[t])) |
                                    _mm512_cmpge_epi32_mask(number, _mm512_load_si512(end[t]));
            _mm512_mask_storeu_ps(to + (t * DEEP + i) * SIDE, apart, _mm512_set1_ps(-INFINITY));
          }
      }
      for (int64_t i = 0; i < DEEP; i += 2)
        interleave(
            wanted >> i & 1 ? value + i * head.value_stride : nullptr,
            wanted >> i & 2 ? value + (i + 1) * head.value_stride : nullptr, i / 2,
            &values[block * Dv * DEEP]);
    }
    lone_scores.resize(lone * DEEP * SIDE), lone_values.resize(lone * Dv * DEEP);
    for (size_t r = 0; r < rows.size(); r++) {
      const Reads& row = rows[r];
      for (int64_t i = 0; i < row.memory; i += DEEP)
        gather(r, true, [&](int64_t lane) { return i + lane < row.memory ? i + lane : -1; });
      for (int64_t i = row.shared; i < row.size; i += DEEP)
        gather(r, false, [&](int64_t lane) {
          return i + lane >= row.first && i + lane < row.size ? row.slot(i + lane) : -1;
        });
    }
  }

  template <class Slot>
  void gather(int64_t r, bool memory, Slot slot_of) {
    const int64_t n = alone.size();
    alone.push_back(
        {r / per, columns(r), memory, &lone_scores[n * DEEP * SIDE], &lone_values[n * Dv * DEEP]});
    const Block& block = alone.back();
    const bf16* value[DEEP];
    for (int64_t i = 0; i < DEEP; i++) {
      const int64_t slot = slot_of(i);
      value[i] = slot < 0 ? nullptr : head.values + slot * head.value_stride;
      if (slot < 0) std::fill_n(&gathered[i * D], D, bf16(0));
      else std::copy_n(head.keys + slot * head.key_stride, D, &gathered[i * D]);
    }
    score<false>(gathered.data(), D, block.tile, block.scores);
    for (int64_t i = 0; i < DEEP; i++)
      if (!value[i]) _mm512_storeu_ps(block.scores + i * SIDE, _mm512_set1_ps(-INFINITY));
    for (int64_t i = 0; i < DEEP; i += 2) interleave(value[i], value[i + 1], i / 2, block.values);
  }

  // Calls f(tile, queries, scores, weights) for all blocks, in the order of the keys.
  template <class F>
  void each(F f) {
    bf16* to = weights.data();
    for (bool memory : {true, false}) {
      for (const Block& block : alone)
        if (block.memory == memory) f(block.tile, block.queries, block.scores, to), to += DEEP * SIDE;
      for (int64_t i = 0; memory && i < blocks * tiles; i++, to += DEEP * SIDE)
        f(i % tiles, __mmask16(0xffff), &scores[i * DEEP * SIDE], to);
    }
  }

  // Scores to weights, which are tiles of rows of queries, and their sums. A key that is not read has the
  // score -infinity.
  void weigh() {
    weights.resize((alone.size() + blocks * tiles) * DEEP * SIDE);
    const __m512 nothing = _mm512_set1_ps(-INFINITY), by = _mm512_set1_ps(cap > 0 ? 1 : scale);
    for (int64_t t = 0; t < tiles; t++) most[t] = nothing;
    each([&](int64_t t, __mmask16 queries, float* s, bf16*) {
      if (cap > 0)
        for (int64_t i = 0; i < DEEP * SIDE; i += SIDE) {
          const __m512 x = _mm512_loadu_ps(s + i);
          const Vec y = capped({_mm512_mul_ps(x, _mm512_set1_ps(scale))}, cap);
          _mm512_mask_storeu_ps(s + i, _mm512_cmp_ps_mask(x, nothing, _CMP_NEQ_UQ), y.v);
        }
      __m512 m[4] = {nothing, nothing, nothing, nothing};
#pragma GCC unroll 32
      for (int64_t i = 0; i < DEEP; i++) m[i % 4] = _mm512_max_ps(_mm512_loadu_ps(s + i * SIDE), m[i % 4]);
      m[0] = _mm512_max_ps(_mm512_max_ps(m[0], m[1]), _mm512_max_ps(m[2], m[3]));
      most[t] = _mm512_mask_max_ps(most[t], queries, most[t], m[0]);
    });
    __m512 sum[2][4];
    for (int64_t t = 0; t < tiles; t++) {
      most[t] = _mm512_max_ps(_mm512_mul_ps(most[t], by), sink());
      for (auto& part : sum[t]) part = _mm512_setzero_ps();
    }
    each([&](int64_t t, __mmask16 queries, float* s, bf16* to) {
      Words in, turned;
      __m512 part[4] = {sum[t][0], sum[t][1], sum[t][2], sum[t][3]};
#pragma GCC unroll 32
      for (int64_t i = 0; i < DEEP; i++) {
        const __m512 x = _mm512_loadu_ps(s + i * SIDE);
        const __mmask16 read = _mm512_mask_cmp_ps_mask(queries, x, nothing, _CMP_NEQ_UQ);
        const __m512 e = _mm512_maskz_mov_ps(read, exponential({_mm512_fmsub_ps(x, by, most[t])}).v);
        part[i % 4] = _mm512_add_ps(part[i % 4], e);
        const __m512i half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(e));
        if (i % 2) in[i / 2] = _mm512_or_si512(in[i / 2], _mm512_slli_epi32(half, 16));
        else in[i / 2] = half;
      }
      std::copy_n(part, 4, sum[t]);
      turn(in, turned);
#pragma GCC unroll 16
      for (int64_t i = 0; i < SIDE; i++) _mm512_storeu_si512(to + i * DEEP, turned[i]);
    });
    for (int64_t t = 0; t < tiles; t++) {
      total[t] = _mm512_add_ps(_mm512_add_ps(sum[t][0], sum[t][1]), _mm512_add_ps(sum[t][2], sum[t][3]));
      if (!sinks.empty()) total[t] = _mm512_add_ps(total[t], exponential({_mm512_sub_ps(sink(), most[t])}).v);
    }
  }

  __m512 sink() const {
    alignas(64) float made[SIDE];
    for (int64_t i = 0; i < SIDE; i++) made[i] = sinks.empty() ? -INFINITY : sinks[i % queries];
    return _mm512_load_ps(made);
  }

  // Adds weighted values to the sums of tile t and, with BOTH, of the next: of `count` blocks.
  template <bool BOTH>
  void add_blocks(const bf16* weight, const bf16* value, int64_t count, int64_t t) {
    written();
    for (int64_t d = 0; d < Dv; d += 2 * SIDE) {
      float* sum = &sums[t * SIDE * Dv + d];
      _tile_loadd(0, sum, Dv * 4);
      _tile_loadd(1, sum + SIDE, Dv * 4);
      if constexpr (BOTH) {
        _tile_loadd(2, sum + SIDE * Dv, Dv * 4);
        _tile_loadd(3, sum + SIDE * Dv + SIDE, Dv * 4);
      }
      for (int64_t i = 0; i < count; i++) {
        const bf16 *w = weight + i * (BOTH ? 2 : 1) * DEEP * SIDE, *v = value + (i * Dv + d) * DEEP;
        _tile_loadd(4, w, 64);
        _tile_loadd(6, v, 64);
        _tile_loadd(7, v + SIDE * DEEP, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BOTH) {
          _tile_loadd(5, w + DEEP * SIDE, 64);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
      }
      _tile_stored(0, sum, Dv * 4);
      _tile_stored(1, sum + SIDE, Dv * 4);
      if constexpr (BOTH) {
        _tile_stored(2, sum + SIDE * Dv, Dv * 4);
        _tile_stored(3, sum + SIDE * Dv + SIDE, Dv * 4);
      }
    }
  }

  template <bool BOTH>
  void add() {
    sums.assign(tiles * SIDE * Dv, 0);
    const bf16* weight = weights.data();
    for (bool memory : {true, false}) {
      for (const Block& block : alone)
        if (block.memory == memory)
          add_blocks<false>(weight, block.values, 1, block.tile), weight += DEEP * SIDE;
      if (memory) add_blocks<BOTH>(weight, values.data(), blocks, 0), weight += blocks * tiles * DEEP * SIDE;
    }
  }

  void write() const {
    for (size_t i = 0; i < out.size(); i++) {
      const int64_t r = i / queries, t = r / per, column = r % per * queries + i % queries;
      alignas(64) float totals[SIDE];
      _mm512_store_ps(totals, total[t]);
      for (int64_t d = 0; d < Dv; d += SIDE) {
        const __m512 x = _mm512_loadu_ps(&sums[(t * SIDE + column) * Dv + d]);
        _mm256_storeu_si256(
            (__m256i*)(out[i] + d),
            (__m256i)_mm512_cvtneps_pbh(_mm512_div_ps(x, _mm512_set1_ps(totals[column]))));
      }
    }
  }
};

// `attention` for bf16 and heads of a multiple of 32 numbers.
inline Tensor attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, float scale, float cap,
    const float* sinks) {
  at::cpu::init_amx();
  const int64_t B = q.size(0), heads = q.size(1), R = q.size(2), D = q.size(3), KV = k.size(1),
                Dv = v.size(3);
  const int64_t group = heads / KV, slice = std::min(group, SIDE), slices = (group + slice - 1) / slice;
  const int64_t per = SIDE / slice, L = keys.size(-1), threads = at::get_num_threads();
  const int64_t one = B * KV * slices * ((R + per - 1) / per);  // jobs of one tile
  const int64_t most = per * (one >= 4 * threads ? 2 : 1), parts = (R + most - 1) / most;
  const Tensor queries = q.contiguous(), out = fresh({B, R, heads, Dv}, q.scalar_type());
  const int32_t* lists = keys.const_data_ptr<int32_t>();
  team::parallel_for(B * KV * slices * parts, 1, [&](int64_t begin, int64_t end) {
    configure(SIDE, SIDE);
    static thread_local Job job;  // keeps its memory
    for (int64_t i = begin; i < end; i++) {
      const int64_t b = i / (KV * slices * parts), h = i / (slices * parts) % KV,
                    g = i / parts % slices * slice, top = i % parts * most;
      job.D = D, job.Dv = Dv, job.scale = scale, job.cap = cap, job.queries = std::min(slice, group - g);
      job.head = {
          k.const_data_ptr<bf16>() + b * k.stride(0) + h * k.stride(1),
          v.const_data_ptr<bf16>() + b * v.stride(0) + h * v.stride(1), k.stride(2), v.stride(2), k.size(2)};
      job.rows.clear(), job.q.clear(), job.out.clear(), job.sinks.clear();
      for (int64_t r = top; r < std::min(R, top + most); r++) {
        job.rows.emplace_back(lists + (b % keys.size(0) * R + r) * L, L);
        TORCH_CHECK(job.rows.back().origin == job.rows[0].origin, "attention: a text begins at one slot");
        for (int64_t n = h * group + g; n < h * group + g + job.queries; n++) {
          job.q.push_back(queries.const_data_ptr<bf16>() + ((b * heads + n) * R + r) * D);
          job.out.push_back(out.data_ptr<bf16>() + ((b * R + r) * heads + n) * Dv);
        }
      }
      if (sinks) job.sinks.assign(sinks + h * group + g, sinks + h * group + g + job.queries);
      job.run();
    }
    _tile_release();
  });
  return out;
}

}  // namespace amx
