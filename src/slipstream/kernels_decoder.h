// A decoder's layers one behind another in one call: the description of `targets/decoder.py`, executed.

#pragma once

#include <torch/custom_class.h>

#include <cmath>
#include <optional>
#include <vector>

#include "kernels_team.h"

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

enum Activation { SILU, GELU, GELU_TANH };

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

// Without `o` there is no attention, without `down` no MLP.
struct Layer {
  std::vector<Matrix> read, up;  // queries, keys and values, or all of them; gate and up, both, or up alone
  Matrix o, down;
  Norm before, behind, second, last;  // attention and MLP
  Norm queries, keys;
  int64_t angles, lists;  // which of a pass's; no angles: -1
  bool attends() const { return o.tiles.defined(); }
  bool has_mlp() const { return down.tiles.defined(); }
};

// What a pass gives all layers.
struct Pass {
  int64_t B, R, M, S;
  std::vector<Tensor> cos, sin, lists;
  const int64_t* slots;
};

class Decoder : public torch::CustomClassHolder {
 public:
  // `parts` of each layer: read (1 or 3), o, up (1 or 2) and down as tiles, scales and bias; four norms and
  // those of queries and keys as weight and shift. `which` of each layer: angles, lists.
  Decoder(
      c10::List<std::optional<Tensor>> parts, std::vector<int64_t> which, std::vector<int64_t> sizes,
      std::vector<double> numbers_of) {
    const int64_t reads = sizes[0], ups = sizes[1];
    heads_ = sizes[2], kv_ = sizes[3], D_ = sizes[4], parallel_ = sizes[5], gated_ = sizes[6];
    activation_ = Activation(sizes[7]);
    const bool centred = sizes[8];
    whole_ = sizes[9];
    const float eps = numbers_of[0], head_eps = numbers_of[1];
    scale_ = numbers_of[2], cap_ = numbers_of[3];
    const size_t each = 3 * (reads + ups + 2) + 2 * 6;
    TORCH_CHECK(parts.size() == each * which.size() / 2, "Decoder: parts and layers do not fit");
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
    for (size_t i = 0; i < which.size(); i += 2) {
      Layer layer;
      for (int64_t j = 0; j < reads; j++) layer.read.push_back(matrix());
      layer.o = matrix();
      for (int64_t j = 0; j < ups; j++) layer.up.push_back(matrix());
      layer.down = matrix();
      for (Norm* to : {&layer.before, &layer.behind, &layer.second, &layer.last}) *to = norm(eps, centred);
      for (Norm* to : {&layer.queries, &layer.keys}) *to = norm(head_eps, false);
      layer.angles = which[i], layer.lists = which[i + 1];
      TORCH_CHECK(layer.attends() || layer.has_mlp(), "Decoder: a layer of nothing");
      attends_ = attends_ || layer.attends();
      layers_.push_back(std::move(layer));
    }
  }

  // Rows x [B, R, H] through all layers: what each says whose number is among `kept`, and what the last one says.
  // `read`: rows that attention of the first layer reads in the place of x.
  std::vector<Tensor> run(
      Tensor x, std::optional<Tensor> read, std::vector<Tensor> cos, std::vector<Tensor> sin, std::vector<Tensor> keys,
      std::vector<Tensor> values, Tensor slots, std::vector<Tensor> lists, int64_t S, std::vector<int64_t> kept) {
    const Tensor at = slots.contiguous();
    Pass pass{x.size(0), x.size(1), x.size(0) * x.size(1), S, {}, {}, {}, at.const_data_ptr<int64_t>()};
    for (auto* list : {&cos, &sin, &lists})
      for (Tensor& each : *list) each = each.contiguous();
    pass.cos = std::move(cos), pass.sin = std::move(sin), pass.lists = std::move(lists);
    TORCH_CHECK(
        !attends_ || (keys.size() == layers_.size() && values.size() == layers_.size() && at.numel() == pass.M),
        "Decoder: layers and cache do not fit");
    std::vector<Tensor> said;
    x = x.contiguous();
    Tensor reads = read ? read->contiguous() : x;
    team::region([&] {
      for (size_t i = 0; i < layers_.size(); i++) {
        const Layer& each = layers_[i];
        tiled::by_kind(x, (each.attends() ? each.o : each.down).tiles, [&](auto kind, auto like) {
          using Kind = decltype(kind);
          using T = decltype(like);
          const Tensor between = each.attends() ? attended<Kind, T>(each, x, reads, keys[i], values[i], pass) : x;
          x = each.has_mlp() ? mlp<Kind, T>(each, x, between) : between;
        });
        reads = x;
        if (std::find(kept.begin(), kept.end(), int64_t(i)) != kept.end()) said.push_back(x);
      }
    });
    said.push_back(x);
    return said;
  }

 private:
  std::vector<Layer> layers_;
  int64_t heads_, kv_, D_;
  bool attends_ = false, parallel_, gated_, whole_;  // whole: norms of queries and keys are of all heads together
  Activation activation_;
  double scale_, cap_;

  // x + attention of the rows that are read.
  template <class Kind, class T>
  Tensor attended(
      const Layer& layer, const Tensor& x, const Tensor& reads, Tensor keys, Tensor values,
      const Pass& pass) const {
    const int64_t M = pass.M, K = reads.size(2), inner = heads_ * values.size(3);
    for (const Matrix& each : layer.read) tiled::check_width(each.tiles, K);
    tiled::check_width(layer.o.tiles, inner);
    TORCH_CHECK(
        reads.numel() == M * K && reads.scalar_type() == x.scalar_type() && layer.o.scales.numel() == x.size(2) &&
            keys.scalar_type() == x.scalar_type(),
        "Decoder: rows, weights and cache do not fit");
    const Tensor q = fresh({pass.B, heads_, pass.R, D_}, x.scalar_type()), out = fresh(x.sizes(), x.scalar_type());
    const auto rows = tiled::prepared<Kind>(reads.const_data_ptr<T>(), M, K, layer.before);
    read<Kind>(layer, rows, keys, values, q.data_ptr<T>(), pass);
    const Tensor seen = attention(
        q, keys.narrow(2, 0, pass.S), values.narrow(2, 0, pass.S), pass.lists[layer.lists], scale_, cap_,
        {});
    added<Kind>(
        tiled::prepared<Kind>(seen.const_data_ptr<T>(), M, inner), layer.o, layer.behind, x.const_data_ptr<T>(),
        out.data_ptr<T>());
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
      offset += sizes[i];
    }
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
              head(row + h * D_, c, s, turned, place(h));
              continue;
            }
            if (!whole_) norm(row + h * D_, D_, normed.data() + h * D_);
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
          const T* value = from[2] + m * stride[2] + h * Dv;
          std::copy(
              value, value + Dv, v + b * values.stride(0) + h * values.stride(1) + slot * values.stride(2));
        }
      }
    });
  }

  // A head's D numbers, of which the first are turned.
  template <class X, class T>
  void head(const X* x, const float* cos, const float* sin, int64_t turned, T* to) const {
    if (turned) tiled::rotate(x, turned, cos, sin, to);
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
  Tensor mlp(const Layer& layer, const Tensor& of, const Tensor& between) const {
    const int64_t H = of.size(2), M = of.numel() / H;
    const Weight up = layer.up.back().weight(), gate = layer.up[0].weight();
    const int64_t inner = layer.up.size() == 1 && gated_ ? up.N / 2 : up.N;
    for (const Matrix& each : layer.up) tiled::check_width(each.tiles, H);
    tiled::check_width(layer.down.tiles, inner);
    TORCH_CHECK(layer.down.scales.numel() == H, "Decoder: rows and weights do not fit");
    const Norm& second = parallel_ && !layer.second.weight ? layer.before : layer.second;
    const auto x = tiled::prepared<Kind>((parallel_ ? of : between).const_data_ptr<T>(), M, H, second);
    const Tensor active = fresh({M, inner}, at::kFloat), out = fresh(of.sizes(), of.scalar_type());
    float* middle = active.data_ptr<float>();
    if (gated_) {
      const int64_t behind = layer.up.size() == 1 ? inner / WIDE : 0;  // panels of the gate before those of up
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
              (activated(Vec::load(made[0] + i), activation_) * Vec::load(made[1] + i)).store(made[0] + i);
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
    added<Kind>(
        tiled::prepared<Kind>(middle, M, inner), layer.down, layer.last, between.const_data_ptr<T>(),
        out.data_ptr<T>());
    return out;
  }
};

}  // namespace decoder
}  // namespace
