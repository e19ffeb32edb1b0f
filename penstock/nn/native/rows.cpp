#include "rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "lanes.h"
#include "pool.h"
#include "vec.h"

namespace penstock {
namespace {

constexpr int64_t ENOUGH = 1 << 14;  // elements that a thread handles in the time that waking another one takes

// x as an E holds it.
template <class E>
f32x16 rounded(f32x16 x) {
    if constexpr (sizeof(E) == 4) return x;
    return widen(narrow(x));
}

// f(d, lanes) for every sixteen elements of a row, the last of which may be fewer.
template <class F>
void each_sixteen(int64_t width, F&& f) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) f(d, [](auto* from) { return load(from); }, [](auto* to, f32x16 x) { store(to, x); });
    if (d < width) {
        const int rest = static_cast<int>(width - d);
        f(d, [=](auto* from) { return load(from, rest); }, [=](auto* to, f32x16 x) { store(to, x, rest); });
    }
}

// f(row) for all rows, by several threads where that is worth it.
template <class F>
void each_row(int64_t rows, int64_t width, F&& f) {
    const int64_t together = std::max<int64_t>(1, ENOUGH / std::max<int64_t>(1, width));
    if (rows <= together) {
        for (int64_t row = 0; row < rows; row++) f(row);
        return;
    }
    parallel_for(static_cast<int>((rows + together - 1) / together), [&](int task) {
        const int64_t end = std::min(rows, (task + 1) * together);
        for (int64_t row = task * together; row < end; row++) f(row);
    });
}

// What a row is multiplied by; its squares are summed up in four vectors, whatever the width.
template <class E>
float inverse_rms(const E* x, float eps, int64_t width) {
    const int64_t whole = width / (4 * LANES) * (4 * LANES);
    f32x16 a{}, b{}, c{}, e{};  // in registers, which an array is not where which of them is next has to be counted
    for (int64_t d = 0; d < whole; d += 4 * LANES) {
        const f32x16 p = load(x + d), q = load(x + d + LANES), r = load(x + d + 2 * LANES), s = load(x + d + 3 * LANES);
        a = fma(p, p, a);
        b = fma(q, q, b);
        c = fma(r, r, c);
        e = fma(s, s, e);
    }
    if (whole < width) {
        f32x16 squares[4] = {a, b, c, e};
        each_sixteen(width - whole, [&](int64_t d, auto get, auto) {
            const f32x16 y = get(x + whole + d);
            squares[d / LANES] = fma(y, y, squares[d / LANES]);
        });
        a = squares[0], b = squares[1], c = squares[2], e = squares[3];
    }
    const float total = sum_lanes((a + b) + (c + e));
    return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

// With a weight of float32 it is rounded only then.
template <class E, class W>
f32x16 weighed(f32x16 normed, f32x16 weight) {
    if constexpr (sizeof(W) == sizeof(E)) return rounded<E>(normed) * weight;
    return normed * weight;
}

template <class E, class W>
void norm(const E* x, const W* weight, float eps, E* out, int64_t width) {
    const f32x16 scale = splat(inverse_rms(x, eps, width));
    each_sixteen(width, [&](int64_t d, auto get, auto put) {
        put(out + d, weighed<E, W>(get(x + d) * scale, get(weight + d)));
    });
}

template <class E>
void add(const E* x, const E* y, E* sum, int64_t width) {
    each_sixteen(width, [&](int64_t d, auto get, auto put) { put(sum + d, get(x + d) + get(y + d)); });
}

// One head. Each product is rounded, as when they are computed one after the other.
template <class E>
void turn(const E* x, const E* cos, const E* sin, E* out, int64_t half, int64_t dim) {
    if (2 * half < dim && x != out) std::memcpy(out + 2 * half, x + 2 * half, (dim - 2 * half) * sizeof(E));
    each_sixteen(half, [&](int64_t d, auto get, auto put) {
        const f32x16 first = get(x + d), second = get(x + half + d), c = get(cos + d), s = get(sin + d);
        put(out + d, rounded<E>(first * c) - rounded<E>(second * s));
        put(out + half + d, rounded<E>(second * c) + rounded<E>(first * s));
    });
}

// The same of a head that is normed first.
template <class E, class W>
void norm_and_turn(const E* x, const W* weight, f32x16 scale, const E* cos, const E* sin, E* out, int64_t half,
                   int64_t dim) {
    if (2 * half < dim)
        each_sixteen(dim - 2 * half, [&](int64_t d, auto get, auto put) {
            const int64_t at = 2 * half + d;
            put(out + at, weighed<E, W>(get(x + at) * scale, get(weight + at)));
        });
    each_sixteen(half, [&](int64_t d, auto get, auto put) {
        const auto normed = [&](int64_t at) {
            return rounded<E>(weighed<E, W>(get(x + at) * scale, get(weight + at)));
        };
        const f32x16 first = normed(d), second = normed(half + d), c = get(cos + d), s = get(sin + d);
        put(out + d, rounded<E>(first * c) - rounded<E>(second * s));
        put(out + half + d, rounded<E>(second * c) + rounded<E>(first * s));
    });
}

template <class E, bool IS_GELU>
void gate(const E* gates, const E* ups, E* out, int64_t width) {
    // (1 + tanh(y)) / 2 is 1 / (1 + e^-2y)
    constexpr float LINEAR = 2 * 0.7978845608f * LOG2_E, CUBIC = 0.044715f * LINEAR;
    each_sixteen(width, [&](int64_t d, auto get, auto put) {
        const f32x16 x = get(gates + d);
        const f32x16 y = IS_GELU ? x * fma(x * x, splat(CUBIC), splat(LINEAR)) : x * splat(LOG2_E);
        const f32x16 power = -max(splat(-126.0f), y);  // of 2; where y is less nothing is left
        put(out + d, rounded<E>(x / (splat(1.0f) + exp2(power))) * get(ups + d));
    });
}

template <class F>
void with_type(bool is_bf16, F&& f) {
    if (is_bf16)
        f(bf16{});
    else
        f(float{});
}

// The same, with the type of norms' weights.
template <class F>
void with_types(bool is_bf16, bool wide, F&& f) {
    with_type(is_bf16, [&](auto type) {
        if (wide)
            f(type, float{});
        else
            f(type, type);
    });
}

// Where a row's K (0) or V (1) of head 0 belongs.
template <class C>
C* place(const Cache& cache, int64_t block, int64_t offset, int64_t kind) {
    return static_cast<C*>(cache.values) + block * cache.block + offset * cache.token + kind * cache.kind;
}

// All of a row, normed first where there is a weight. What heads are scaled by is known before any is needed: so many
// square roots and divisions take little longer than one.
template <class E, class W>
void turn_heads(const E* x, const W* weight, float eps, const E* cos, const E* sin, int64_t half, E* out, int64_t out_head,
                int64_t heads, int64_t dim) {
    constexpr int64_t TOGETHER = 8;
    float scales[TOGETHER];
    for (int64_t first = 0; first < heads; first += TOGETHER) {
        const int64_t end = std::min(heads, first + TOGETHER);
        if (weight)
            for (int64_t h = first; h < end; h++) scales[h - first] = inverse_rms(x + h * dim, eps, dim);
        for (int64_t h = first; h < end; h++) {
            E* to = out + h * out_head;
            if (weight)
                norm_and_turn(x + h * dim, weight, splat(scales[h - first]), cos, sin, to, half, dim);
            else
                turn(x + h * dim, cos, sin, to, half, dim);
        }
    }
}

// One head in 8 bits. Returns its scale, which is no number where one of the values is none.
template <class E>
float quantise(const E* from, int8_t* to, int64_t dim) {
    f32x16 most{}, nothing{};
    each_sixteen(dim, [&](int64_t d, auto get, auto) {
        const f32x16 x = get(from + d);
        most = max(most, max(x, -x));
        nothing = fma(x, f32x16{}, nothing);
    });
    const float largest = max_lanes(most)[0];
    const f32x16 inverse = splat(largest < 1e-30f ? 0.0f : 127.0f / largest);
    each_sixteen(dim, [&](int64_t d, auto get, auto) {
        int8_t values[LANES];
        store_i8(values, to_whole(get(from + d) * inverse));
        std::memcpy(to + d, values, std::min<int64_t>(LANES, dim - d));
    });
    return largest / 127.0f + sum_lanes(nothing);
}

template <class E>
void put_heads(const Cache& cache, int64_t block, int64_t offset, int64_t kind, const E* from) {
    if (cache.scales) {
        int8_t* to = place<int8_t>(cache, block, offset, kind);
        float* scales = cache.scales + block * cache.scale_block + offset * cache.scale_token + kind * cache.scale_kind;
        for (int64_t h = 0; h < cache.kv_heads; h++)
            scales[h * cache.scale_head] = quantise(from + h * cache.dim, to + h * cache.head, cache.dim);
        return;
    }
    E* to = place<E>(cache, block, offset, kind);
    for (int64_t h = 0; h < cache.kv_heads; h++)
        std::memcpy(to + h * cache.head, from + h * cache.dim, cache.dim * sizeof(E));
}

}  // namespace

void rms_norm(bool is_bf16, const void* x, int64_t x_stride, Norm by, float eps, void* out, int64_t out_stride,
              int64_t rows, int64_t width) {
    with_types(is_bf16, by.wide, [&](auto type, auto weight_type) {
        using E = decltype(type);
        using W = decltype(weight_type);
        each_row(rows, width, [&](int64_t row) {
            norm(static_cast<const E*>(x) + row * x_stride, static_cast<const W*>(by.weight), eps,
                 static_cast<E*>(out) + row * out_stride, width);
        });
    });
}

void add_rms_norm(bool is_bf16, const void* x, const void* residual, Norm by, float eps, void* out, void* sum,
                  int64_t rows, int64_t width) {
    with_types(is_bf16, by.wide, [&](auto type, auto weight_type) {
        using E = decltype(type);
        using W = decltype(weight_type);
        each_row(rows, width, [&](int64_t row) {
            const int64_t at = row * width;
            E* total = static_cast<E*>(sum) + at;
            add(static_cast<const E*>(x) + at, static_cast<const E*>(residual) + at, total, width);
            norm(total, static_cast<const W*>(by.weight), eps, static_cast<E*>(out) + at, width);
        });
    });
}

void scale(bool is_bf16, void* x, float factor, int64_t rows, int64_t width) {
    with_type(is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, width, [&](int64_t row) {
            E* at = static_cast<E*>(x) + row * width;
            each_sixteen(width, [&](int64_t d, auto get, auto put) { put(at + d, get(at + d) * splat(factor)); });
        });
    });
}

void rotary(bool is_bf16, const void* x, int64_t x_stride, int64_t head_stride, Rotation rotation, bool interleaved,
            void* out, int64_t out_stride, int64_t out_head_stride, int64_t rows, int64_t heads, int64_t dim) {
    with_type(is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, heads * dim, [&](int64_t row) {
            const int64_t half = rotation.turned / 2;
            const E* cos = static_cast<const E*>(rotation.cos) + row * half;
            const E* sin = static_cast<const E*>(rotation.sin) + row * half;
            for (int64_t h = 0; h < heads; h++) {
                const E* from = static_cast<const E*>(x) + row * x_stride + h * head_stride;
                E* to = static_cast<E*>(out) + row * out_stride + h * out_head_stride;
                if (interleaved) {
                    for (int64_t i = 0; i < half; i++) to[i] = from[2 * i], to[half + i] = from[2 * i + 1];
                    std::memcpy(to + 2 * half, from + 2 * half, (dim - 2 * half) * sizeof(E));
                    from = to;
                }
                turn(from, cos, sin, to, half, dim);
            }
        });
    });
}

void gate_mul(bool is_bf16, int64_t activation, const void* gate_up, int64_t stride, void* out, int64_t rows,
              int64_t width) {
    with_type(is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, width, [&](int64_t row) {
            const E* from = static_cast<const E*>(gate_up) + row * stride;
            E* to = static_cast<E*>(out) + row * width;
            if (activation == GELU_TANH)
                gate<E, true>(from, from + width, to, width);
            else
                gate<E, false>(from, from + width, to, width);
        });
    });
}

void store_kv(const Cache& cache, const void* k, int64_t k_stride, const void* v, int64_t v_stride, const int64_t* blocks,
              const int64_t* offsets, int64_t rows) {
    with_type(cache.is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, cache.kv_heads * cache.dim, [&](int64_t row) {
            put_heads(cache, blocks[row], offsets[row], 0, static_cast<const E*>(k) + row * k_stride);
            if (v) put_heads(cache, blocks[row], offsets[row], 1, static_cast<const E*>(v) + row * v_stride);
        });
    });
}

void qkv_to_cache(const Cache& cache, void* qkv, int64_t stride, int64_t heads, Norm q_norm, Norm k_norm, float eps,
                  Rotation rotation, const int64_t* blocks, const int64_t* offsets, int64_t rows) {
    with_types(cache.is_bf16, q_norm.wide, [&](auto type, auto weight_type) {
        using E = decltype(type);
        using W = decltype(weight_type);
        const int64_t dim = cache.dim, half = rotation.turned / 2;
        each_row(rows, (heads + 2 * cache.kv_heads) * dim, [&](int64_t row) {
            E* q = static_cast<E*>(qkv) + row * stride;
            E* k = q + heads * dim;
            const E* cos = static_cast<const E*>(rotation.cos) + row * half;
            const E* sin = static_cast<const E*>(rotation.sin) + row * half;
            const bool scaled = cache.scales != nullptr;  // then all of a head is needed before any of it is stored
            E* to = scaled ? k : place<E>(cache, blocks[row], offsets[row], 0);
            const int64_t to_head = scaled ? dim : cache.head;
            turn_heads(q, static_cast<const W*>(q_norm.weight), eps, cos, sin, half, q, dim, heads, dim);
            turn_heads(k, static_cast<const W*>(k_norm.weight), eps, cos, sin, half, to, to_head, cache.kv_heads, dim);
            if (scaled) put_heads(cache, blocks[row], offsets[row], 0, k);
            put_heads(cache, blocks[row], offsets[row], 1, k + cache.kv_heads * dim);
        });
    });
}

}  // namespace penstock

using penstock::Cache;

extern "C" {

void penstock_rms_norm(int64_t is_bf16, const void* x, int64_t x_stride, const void* weight, int64_t wide, float eps,
                       void* out, int64_t rows, int64_t width) {
    penstock::rms_norm(is_bf16, x, x_stride, {weight, wide}, eps, out, width, rows, width);
}

void penstock_add_rms_norm(int64_t is_bf16, const void* x, const void* residual, const void* weight, int64_t wide,
                           float eps, void* out, void* sum, int64_t rows, int64_t width) {
    penstock::add_rms_norm(is_bf16, x, residual, {weight, wide}, eps, out, sum, rows, width);
}

void penstock_rotary(int64_t is_bf16, const void* x, int64_t x_stride, int64_t head_stride, const void* cos,
                     const void* sin, int64_t turned, int64_t interleaved, void* out, int64_t out_stride,
                     int64_t out_head_stride, int64_t rows, int64_t heads, int64_t dim) {
    penstock::rotary(is_bf16, x, x_stride, head_stride, {cos, sin, turned}, interleaved, out, out_stride, out_head_stride,
                     rows, heads, dim);
}

void penstock_gate_mul(int64_t is_bf16, int64_t activation, const void* gate_up, int64_t stride, void* out, int64_t rows,
                       int64_t width) {
    penstock::gate_mul(is_bf16, activation, gate_up, stride, out, rows, width);
}

void penstock_store_kv(const Cache* cache, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                       const int64_t* blocks, const int64_t* offsets, int64_t rows) {
    penstock::store_kv(*cache, k, k_stride, v, v_stride, blocks, offsets, rows);
}

void penstock_qkv_to_cache(const Cache* cache, void* qkv, int64_t stride, int64_t heads, const void* q_weight,
                           const void* k_weight, int64_t wide, float eps, const void* cos, const void* sin,
                           int64_t turned, const int64_t* blocks, const int64_t* offsets, int64_t rows) {
    penstock::qkv_to_cache(*cache, qkv, stride, heads, {q_weight, wide}, {k_weight, wide}, eps, {cos, sin, turned}, blocks,
                           offsets, rows);
}
}
