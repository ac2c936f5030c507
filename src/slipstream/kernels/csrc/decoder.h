// A decoder's layers one behind another in one call: the description of `targets/decoder.py`, executed.

#pragma once

#include <torch/custom_class.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <vector>

#include "team.h"

namespace {
namespace decoder {

using at::Tensor;
using tiled::Norm;
using tiled::numbers;
using tiled::Part;
using tiled::Rows;
using tiled::Weight;
using tiled::WIDE;

// A weight in tiles.
struct Matrix {
  Tensor tiles, scales;
  Part bias;
  Weight weight() const {
    Weight made(tiles, scales);
    made.bias = numbers(bias);
    return made;
  }
};

enum Activation { SILU, GELU, GELU_TANH, CLAMPED };  // the last with a gate alone, see `Decoder::gated`

inline Vec activated(Vec x, Activation how) {
  if (how == SILU) return tiled::silu(x);
  if (how == GELU_TANH) {  // x / (1 + e^(-2 u)), u = √(2/π) (x + 0.044715 x³)
    const Vec u = x * fma(x * x, Vec::set(0.044715f), Vec::set(1)) * Vec::set(2 * 0.7978845608f);
    const Vec zero = Vec::set(0), e = exponential(zero - max(u, zero - u));
    // The share of x that is left: 1 / (1 + e) where u is above 0, e / (1 + e) where it is below.
    const Vec above = Vec::set(1) / (Vec::set(1) + e);
    float sign[W], share[W], other[W];
    u.store(sign), above.store(share), (e * above).store(other);
    for (int i = 0; i < W; i++) share[i] = sign[i] < 0 ? other[i] : share[i];
    return x * Vec::load(share);
  }
  float made[W];
  x.store(made);
  for (int i = 0; i < W; i++) made[i] = 0.5f * made[i] * (1 + std::erf(made[i] * 0.7071067812f));
  return Vec::load(made);
}

struct Mlp {
  std::vector<Matrix> up;  // gate and up, both, or up alone
  Matrix down;
};

// Without `o` there is no attention, without `down` and experts no MLP.
struct Layer {
  std::vector<Matrix> read;  // queries, keys and values, or all of them
  Matrix o, router;
  Mlp mlp;
  std::vector<Mlp> experts;
  Norm before, behind, second, last;  // attention and MLP
  Norm queries, keys;
  Part sinks;  // of heads
  int64_t angles, lists;  // which of a pass's; no angles: -1
  bool attends() const { return o.tiles.defined(); }
  bool has_mlp() const { return mlp.down.tiles.defined(); }
};

// What a pass gives all layers.
struct Pass {
  int64_t B, R, M, S;
  std::vector<Tensor> cos, sin, lists;
  const int64_t* slots;
};

class Decoder : public torch::CustomClassHolder {
 public:
  // `parts` of each layer: read (1 or 3), o, up (1 or 2) and down as tiles, scales and bias, with experts the
  // router, and up and down of each; four norms and those of queries and keys as weight and shift; sinks. Behind
  // all layers the last norm. `which` of each layer: angles, lists, and how many experts there are.
  Decoder(
      c10::List<std::optional<Tensor>> parts, std::vector<int64_t> which, std::vector<int64_t> sizes,
      std::vector<double> numbers_of) {
    const int64_t reads = sizes[0], ups = sizes[1];
    by_head_ = sizes[10], pairs_ = sizes[11];
    heads_ = sizes[2], kv_ = sizes[3], D_ = sizes[4], parallel_ = sizes[5], gated_ = sizes[6];
    activation_ = Activation(sizes[7]);
    const bool centred = sizes[8];
    whole_ = sizes[9];
    const float eps = numbers_of[0], head_eps = numbers_of[1];
    scale_ = numbers_of[2], cap_ = numbers_of[3], alpha_ = numbers_of[4], limit_ = numbers_of[5];
    chosen_ = sizes[12], shared_ = sizes[13];
    size_t at = 0;
    auto next = [&]() -> Part { return parts.get(at++); };
    auto matrix = [&] {
      const Part tiles = next(), scales = next(), bias = next();
      if (!tiles) return Matrix();
      Matrix made{*tiles, scales.value(), bias};
      TORCH_CHECK(
          made.tiles.dim() > 2 && made.tiles.is_contiguous() && made.scales.is_contiguous() &&
              made.tiles.size(0) == (made.scales.numel() + WIDE - 1) / WIDE &&
              (!made.bias || made.bias->numel() == made.scales.numel()),
          "Decoder: tiles, scales and bias do not fit");
      return made;
    };
    auto norm = [&](float eps, bool centred) {
      Norm made{next(), next()};
      made.weight = numbers(made.weights), made.shift = numbers(made.shifts);
      made.eps = eps, made.centred = centred;
      return made;
    };
    auto mlp = [&] {
      Mlp made;
      for (int64_t j = 0; j < ups; j++) made.up.push_back(matrix());
      made.down = matrix();
      return made;
    };
    for (size_t i = 0; i < which.size(); i += 3) {
      Layer layer;
      for (int64_t j = 0; j < reads; j++) layer.read.push_back(matrix());
      layer.o = matrix(), layer.mlp = mlp();
      if (which[i + 2]) layer.router = matrix();
      for (int64_t j = 0; j < which[i + 2]; j++) layer.experts.push_back(mlp());
      for (Norm* to : {&layer.before, &layer.behind, &layer.second, &layer.last}) *to = norm(eps, centred);
      for (Norm* to : {&layer.queries, &layer.keys}) *to = norm(head_eps, false);
      layer.sinks = next();
      layer.angles = which[i], layer.lists = which[i + 1];
      TORCH_CHECK(int64_t(layer.experts.size()) >= (layer.experts.empty() ? 0 : chosen_), "Decoder: few experts");
      attends_ = attends_ || layer.attends();
      layers_.push_back(std::move(layer));
    }
    final_ = norm(eps, centred);
    TORCH_CHECK(at == parts.size(), "Decoder: parts and layers do not fit");
  }

  // Rows x [B, R, H] through all layers: what each says whose number is among `kept`, and what the last one
  // says, normed. `read`: rows that attention of the first layer reads in the place of x.
  std::vector<Tensor> run(
      Tensor x, std::optional<Tensor> read, std::vector<Tensor> cos, std::vector<Tensor> sin,
      std::vector<Tensor> keys, std::vector<Tensor> values, Tensor slots, std::vector<Tensor> lists, int64_t S,
      std::vector<int64_t> kept) {
    const Tensor at = slots.contiguous();
    Pass pass{x.size(0), x.size(1), x.size(0) * x.size(1), S, {}, {}, {}, at.const_data_ptr<int64_t>()};
    for (auto* list : {&cos, &sin, &lists})
      for (Tensor& each : *list) each = each.contiguous();
    pass.cos = std::move(cos), pass.sin = std::move(sin), pass.lists = std::move(lists);
    TORCH_CHECK(
        !attends_ ||
            (keys.size() == layers_.size() && values.size() == layers_.size() && at.numel() == pass.M),
        "Decoder: layers and cache do not fit");
    std::vector<Tensor> said;
    x = x.contiguous();
    Tensor reads = read ? read->contiguous() : x;
    team::region([&] {
      for (size_t i = 0; i < layers_.size(); i++) {
        const Layer& each = layers_[i];
        Tensor between = x;
        if (each.attends())
          tiled::by_kind(x, each.o.tiles, [&](auto kind, auto like) {
            between = attended<decltype(kind), decltype(like)>(each, x, reads, keys[i], values[i], pass);
          });
        if (!each.experts.empty())
          tiled::by_kind(x, each.router.tiles, [&](auto kind, auto like) {
            between = routed<decltype(kind), decltype(like)>(each, between);
          });
        else if (each.has_mlp())
          tiled::by_kind(x, each.mlp.down.tiles, [&](auto kind, auto like) {
            between = added_mlp<decltype(kind), decltype(like)>(each, x, between);
          });
        reads = x = between;
        if (std::find(kept.begin(), kept.end(), int64_t(i)) != kept.end()) said.push_back(x);
      }
      if (final_.weight) x = x.scalar_type() == at::kFloat ? normed<float>(x) : normed<bf16>(x);
    });
    said.push_back(x);
    return said;
  }

 private:
  std::vector<Layer> layers_;
  Norm final_;
  int64_t heads_, kv_, D_;
  bool attends_ = false, parallel_, gated_;
  bool whole_;    // norms of queries and keys are of all heads together
  bool by_head_;  // one matrix reads a head's queries, keys and values, and then the next head's
  bool pairs_;    // angles turn neighbours, and not halves
  int64_t chosen_;  // experts of each row
  bool shared_;     // whose weights add up to 1
  Activation activation_;
  double scale_, cap_;
  float alpha_, limit_;

  // Rows behind the last norm.
  template <class T>
  Tensor normed(const Tensor& x) const {
    const int64_t H = x.size(2);
    const Tensor out = fresh(x.sizes(), x.scalar_type());
    const T* from = x.const_data_ptr<T>();
    T* to = out.data_ptr<T>();
    team::parallel_for(x.numel() / H, 4, [&](int64_t begin, int64_t end) {
      std::vector<float> made(H);
      for (int64_t m = begin; m < end; m++) {
        final_(from + m * H, H, made.data());
        for (int64_t h = 0; h < H; h++) to[m * H + h] = T(made[h]);
      }
    });
    return out;
  }

  // x + attention of the rows that are read.
  template <class Kind, class T>
  Tensor attended(
      const Layer& layer, const Tensor& x, const Tensor& reads, Tensor keys, Tensor values,
      const Pass& pass) const {
    const int64_t M = pass.M, K = reads.size(2), inner = heads_ * values.size(3);
    for (const Matrix& each : layer.read) tiled::check_width(each.tiles, K);
    tiled::check_width(layer.o.tiles, inner);
    TORCH_CHECK(
        reads.numel() == M * K && reads.scalar_type() == x.scalar_type() &&
            layer.o.scales.numel() == x.size(2) && keys.scalar_type() == x.scalar_type(),
        "Decoder: rows, weights and cache do not fit");
    const Tensor q = fresh({pass.B, heads_, pass.R, D_}, x.scalar_type()),
                 out = fresh(x.sizes(), x.scalar_type());
    const auto rows = tiled::prepared<Kind>(reads.const_data_ptr<T>(), M, K, layer.before);
    read<Kind>(layer, rows, keys, values, q.data_ptr<T>(), pass);
    const Tensor seen = attention(
        q, keys.narrow(2, 0, pass.S), values.narrow(2, 0, pass.S), pass.lists[layer.lists], scale_, cap_,
        layer.sinks);
    added<Kind>(
        tiled::prepared<Kind>(seen.const_data_ptr<T>(), M, inner), layer.o, layer.behind,
        x.const_data_ptr<T>(), out.data_ptr<T>());
    return out;
  }

  // Queries, keys and values, normed and turned: queries at q [B, heads, R, D], the others in their slots.
  template <class Kind, class T>
  void read(
      const Layer& layer, const Rows<Kind>& x, const Tensor& keys, const Tensor& values, T* q,
      const Pass& pass) const {
    const int64_t Dv = values.size(3), sizes[3] = {heads_ * D_, kv_ * D_, kv_ * Dv};
    std::vector<Weight> weights;
    std::vector<Tensor> made;
    std::vector<T*> to;
    for (const Matrix& each : layer.read) {
      weights.push_back(each.weight());
      made.push_back(fresh({x.M, weights.back().N}, keys.scalar_type()));
      to.push_back(made.back().data_ptr<T>());
    }
    tiled::linear_into<Kind, T, T>(x, weights, nullptr, to.data());
    const bool merged = layer.read.size() == 1;
    const T* from[3];
    int64_t stride[3], offset = 0;
    for (int i = 0; i < 3; i++) {
      from[i] = merged ? to[0] + offset : to[i], stride[i] = merged ? weights[0].N : sizes[i];
      offset += by_head_ ? D_ : sizes[i];
    }
    const int64_t step = by_head_ ? 3 * D_ : D_;  // from head to head
    const float *cos = nullptr, *sin = nullptr;
    int64_t turned = 0, angles = 1;
    if (layer.angles >= 0) {
      const Tensor &c = pass.cos[layer.angles], &s = pass.sin[layer.angles];
      turned = c.size(-1), angles = c.numel() / turned;
      cos = c.const_data_ptr<float>(), sin = s.const_data_ptr<float>();
    }
    T *k = keys.data_ptr<T>(), *v = values.data_ptr<T>();
    team::parallel_for(x.M, 4, [&](int64_t begin, int64_t end) {
      std::vector<float> normed(std::max(sizes[0], sizes[1]));
      for (int64_t m = begin; m < end; m++) {
        const int64_t b = m / pass.R, r = m % pass.R, slot = pass.slots[m];
        const float *c = cos + m % angles * turned, *s = sin + m % angles * turned;
        auto turn = [&](const Norm& norm, const T* row, int64_t heads, auto place) {
          if (norm.weight && whole_) norm(row, heads * D_, normed.data());
          for (int64_t h = 0; h < heads; h++) {
            if (!norm.weight) {
              head(row + h * step, c, s, turned, place(h));
              continue;
            }
            if (!whole_) norm(row + h * step, D_, normed.data() + h * D_);
            head(normed.data() + h * D_, c, s, turned, place(h));
          }
        };
        turn(layer.queries, from[0] + m * stride[0], heads_, [&](int64_t h) {
          return q + ((b * heads_ + h) * pass.R + r) * D_;
        });
        turn(layer.keys, from[1] + m * stride[1], kv_, [&](int64_t h) {
          return k + b * keys.stride(0) + h * keys.stride(1) + slot * keys.stride(2);
        });
        for (int64_t h = 0; h < kv_; h++) {
          const T* value = from[2] + m * stride[2] + h * (by_head_ ? step : Dv);
          std::copy(
              value, value + Dv, v + b * values.stride(0) + h * values.stride(1) + slot * values.stride(2));
        }
      }
    });
  }

  // A head's D numbers, of which the first are turned.
  template <class X, class T>
  void head(const X* x, const float* cos, const float* sin, int64_t turned, T* to) const {
    if (pairs_) {
      for (int64_t d = 0; d < turned; d += 2) {
        const float a = x[d], b = x[d + 1];
        to[d] = T(a * cos[d] - b * sin[d]), to[d + 1] = T(b * cos[d + 1] + a * sin[d + 1]);
      }
    } else if (turned) {
      tiled::rotate(x, turned, cos, sin, to);
    }
    for (int64_t d = turned; d < D_; d++) to[d] = T(float(x[d]));
  }

  // rows + the product, which may have a norm of its own behind it.
  template <class Kind, class T>
  void added(const Rows<Kind>& x, const Matrix& matrix, const Norm& norm, const T* rows, T* to) const {
    const Weight weight = matrix.weight();
    if (!norm.weight) {
      tiled::linear_into<Kind, T, T>(x, {weight}, rows, &to);
      return;
    }
    const int64_t N = weight.N;
    const Tensor made = fresh({x.M, N}, at::kFloat);
    float* product = made.data_ptr<float>();
    tiled::linear_into<Kind, float, float>(x, {weight}, nullptr, &product);
    team::parallel_for(x.M, 4, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; m++) {
        norm(product + m * N, N, product + m * N);
        for (int64_t n = 0; n < N; n++) to[m * N + n] = T(float(rows[m * N + n]) + product[m * N + n]);
      }
    });
  }

  // `between`, which attention made of x, + the MLP.
  template <class Kind, class T>
  Tensor added_mlp(const Layer& layer, const Tensor& x, const Tensor& between) const {
    const int64_t H = x.size(2), M = x.numel() / H;
    const Norm& second = parallel_ && !layer.second.weight ? layer.before : layer.second;
    const auto rows = tiled::prepared<Kind>((parallel_ ? x : between).const_data_ptr<T>(), M, H, second);
    const Tensor inner = active(layer.mlp, rows, H), out = fresh(x.sizes(), x.scalar_type());
    added<Kind>(
        tiled::prepared<Kind>(inner.const_data_ptr<float>(), M, inner.size(1)), layer.mlp.down, layer.last,
        between.const_data_ptr<T>(), out.data_ptr<T>());
    return out;
  }

  // `between` + what the experts that each row chose say of it, in their order. An expert is read once.
  template <class Kind, class T>
  Tensor routed(const Layer& layer, const Tensor& between) const {
    using Number = typename Kind::Number;
    const int64_t H = between.size(2), M = between.numel() / H, E = layer.experts.size();
    const T* from = between.const_data_ptr<T>();
    const auto rows = tiled::prepared<Kind>(from, M, H, layer.second);
    tiled::check_width(layer.router.tiles, H);
    const Tensor scores = fresh({M, E}, at::kFloat), sum = fresh({M, H}, at::kFloat),
                 out = fresh(between.sizes(), between.scalar_type());
    float *score = scores.data_ptr<float>(), *total = sum.data_ptr<float>();
    tiled::linear_into<Kind, float, float>(rows, {layer.router.weight()}, nullptr, &score);
    std::fill_n(total, M * H, 0.0f);
    std::vector<std::vector<std::pair<int64_t, float>>> asked(E);  // rows, and by what weight
    for (int64_t m = 0; m < M; m++) choose<T>(score + m * E, E, [&](int64_t e, float w) { asked[e].push_back({m, w}); });
    for (int64_t e = 0; e < E; e++) {
      const int64_t n = asked[e].size();
      if (n == 0) continue;
      const Tensor memory = fresh({n * rows.stride * int64_t(sizeof(Number))}, at::kByte);
      Number* numbers = static_cast<Number*>(memory.data_ptr());
      std::vector<float> scales(n);
      for (int64_t i = 0; i < n; i++) {
        const int64_t m = asked[e][i].first;
        std::copy_n(rows.numbers + m * rows.stride, rows.stride, numbers + i * rows.stride);
        scales[i] = rows.scale(m);
      }
      const Tensor inner = active(layer.experts[e], Rows<Kind>{n, rows.stride, numbers, scales.data(), memory}, H);
      const Tensor made = fresh({n, H}, at::kFloat);
      float* said = made.data_ptr<float>();
      tiled::linear_into<Kind, float, float>(
          tiled::prepared<Kind>(inner.const_data_ptr<float>(), n, inner.size(1)),
          {layer.experts[e].down.weight()}, nullptr, &said);
      team::parallel_for(n, 8, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) {
          const auto [m, weight] = asked[e][i];
          for (int64_t h = 0; h < H; h++) total[m * H + h] += weight * said[i * H + h];
        }
      });
    }
    T* to = out.data_ptr<T>();
    for (int64_t i = 0; i < M * H; i++) to[i] = T(float(from[i]) + total[i]);
    return out;
  }

  // Calls f(expert, weight) for the likeliest experts of a row's scores, which are rounded as rows are.
  template <class T, class F>
  void choose(float* scores, int64_t E, F f) const {
    float most = -INFINITY, all = 0, kept = 0;
    for (int64_t e = 0; e < E; e++) scores[e] = float(T(scores[e])), most = std::max(most, scores[e]);
    for (int64_t e = 0; e < E; e++) scores[e] = std::exp(scores[e] - most), all += scores[e];
    std::vector<int64_t> order(E);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
    for (int64_t i = 0; i < chosen_; i++) kept += scores[order[i]];
    for (int64_t i = 0; i < chosen_; i++) f(order[i], scores[order[i]] / (shared_ ? kept : all));
  }

  // What gate and up say; clamped, (up + 1) · gate · σ(α gate), neither further from 0 than the limit, but a
  // gate below it.
  Vec gated(Vec gate, Vec up) const {
    if (activation_ != CLAMPED) return activated(gate, activation_) * up;
    const Vec zero = Vec::set(0), limit = Vec::set(limit_), least = zero - limit;
    const Vec x = zero - max(zero - gate, least), y = max(zero - max(zero - up, least), least);
    return (y + Vec::set(1)) * tiled::silu(Vec::set(alpha_) * x) * Vec::set(1 / alpha_);
  }

  // Rows of an MLP before `down`.
  template <class Kind>
  Tensor active(const Mlp& mlp, const Rows<Kind>& x, int64_t H) const {
    const Weight up = mlp.up.back().weight(), gate = mlp.up[0].weight();
    const int64_t inner = mlp.up.size() == 1 && gated_ ? up.N / 2 : up.N;
    for (const Matrix& each : mlp.up) tiled::check_width(each.tiles, H);
    tiled::check_width(mlp.down.tiles, inner);
    TORCH_CHECK(mlp.down.scales.numel() == H, "Decoder: rows and weights do not fit");
    const Tensor made = fresh({x.M, inner}, at::kFloat);
    float* middle = made.data_ptr<float>();
    if (gated_) {
      const int64_t behind = mlp.up.size() == 1 ? inner / WIDE : 0;  // panels of the gate before those of up
      tiled::products<2>(
          x, (inner + WIDE - 1) / WIDE,
          [&](int64_t p, int j) {
            return j ? up.panel<Kind>(p + behind, x.stride) : gate.panel<Kind>(p, x.stride);
          },
          [&](int64_t p, int64_t m, const typename Kind::Sum* const (&sums)[2]) {
            float made[2][WIDE];
            const int64_t n = std::min(inner - p * WIDE, WIDE);
            gate.scaled(sums[0], p, x.scale(m), made[0]), up.scaled(sums[1], p + behind, x.scale(m), made[1]);
            for (int64_t i = 0; i < WIDE; i += W)
              gated(Vec::load(made[0] + i), Vec::load(made[1] + i)).store(made[0] + i);
            std::copy_n(made[0], n, middle + m * inner + p * WIDE);
          });
    } else {
      tiled::products<1>(
          x, up.panels, [&](int64_t p, int) { return up.panel<Kind>(p, x.stride); },
          [&](int64_t p, int64_t m, const typename Kind::Sum* const (&sums)[1]) {
            float made[WIDE];
            const int64_t n = up.scaled(sums[0], p, x.scale(m), made);
            for (int64_t i = 0; i < WIDE; i += W)
              activated(Vec::load(made + i), activation_).store(made + i);
            std::copy_n(made, n, middle + m * inner + p * WIDE);
          });
    }
    return made;
  }
};

}  // namespace decoder
}  // namespace
