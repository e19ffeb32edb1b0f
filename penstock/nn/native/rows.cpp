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

template <class E>
void norm(const E* x, const E* weight, float eps, E* out, int64_t width) {
    const f32x16 scale = splat(inverse_rms(x, eps, width));
    each_sixteen(width, [&](int64_t d, auto get, auto put) {
        put(out + d, rounded<E>(get(x + d) * scale) * get(weight + d));
    });
}

template <class E>
void add(const E* x, const E* y, E* sum, int64_t width) {
    each_sixteen(width, [&](int64_t d, auto get, auto put) { put(sum + d, get(x + d) + get(y + d)); });
}

// One head. Each product is rounded, as when they are computed one after the other.
template <class E>
void turn(const E* x, const E* cos, const E* sin, E* out, int64_t half) {
    each_sixteen(half, [&](int64_t d, auto get, auto put) {
        const f32x16 first = get(x + d), second = get(x + half + d), c = get(cos + d), s = get(sin + d);
        put(out + d, rounded<E>(first * c) - rounded<E>(second * s));
        put(out + half + d, rounded<E>(second * c) + rounded<E>(first * s));
    });
}

// The same of a head that is normed first.
template <class E>
void norm_and_turn(const E* x, const E* weight, f32x16 scale, const E* cos, const E* sin, E* out, int64_t half) {
    each_sixteen(half, [&](int64_t d, auto get, auto put) {
        const auto normed = [&](int64_t at) { return rounded<E>(rounded<E>(get(x + at) * scale) * get(weight + at)); };
        const f32x16 first = normed(d), second = normed(half + d), c = get(cos + d), s = get(sin + d);
        put(out + d, rounded<E>(first * c) - rounded<E>(second * s));
        put(out + half + d, rounded<E>(second * c) + rounded<E>(first * s));
    });
}

template <class E>
void gate(const E* gates, const E* ups, E* out, int64_t width) {
    each_sixteen(width, [&](int64_t d, auto get, auto put) {
        const f32x16 x = get(gates + d);
        const f32x16 power = -max(splat(-126.0f), x * splat(LOG2_E));  // e^-x is 2^power; where x is less nothing is left
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

// Where a row's K of head 0 belongs.
template <class E>
E* place(const Cache& cache, int64_t layer, int64_t block, int64_t offset) {
    return static_cast<E*>(cache.base) + block * cache.block + layer * cache.layer + offset * cache.token;
}

// All of a row, normed first where there is a weight. What heads are scaled by is known before any is needed: so many
// square roots and divisions take little longer than one.
template <class E>
void turn_heads(const E* x, const E* weight, float eps, const E* cos, const E* sin, E* out, int64_t out_head, int64_t heads,
                int64_t dim) {
    constexpr int64_t TOGETHER = 8;
    float scales[TOGETHER];
    for (int64_t first = 0; first < heads; first += TOGETHER) {
        const int64_t end = std::min(heads, first + TOGETHER);
        if (weight)
            for (int64_t h = first; h < end; h++) scales[h - first] = inverse_rms(x + h * dim, eps, dim);
        for (int64_t h = first; h < end; h++) {
            E* to = out + h * out_head;
            if (weight)
                norm_and_turn(x + h * dim, weight, splat(scales[h - first]), cos, sin, to, dim / 2);
            else
                turn(x + h * dim, cos, sin, to, dim / 2);
        }
    }
}

template <class E>
void put_heads(const Cache& cache, const E* from, E* to) {
    for (int64_t h = 0; h < cache.kv_heads; h++)
        std::memcpy(to + h * cache.head, from + h * cache.dim, cache.dim * sizeof(E));
}

}  // namespace

void rms_norm(bool is_bf16, const void* x, int64_t x_stride, const void* weight, float eps, void* out,
              int64_t out_stride, int64_t rows, int64_t width) {
    with_type(is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, width, [&](int64_t row) {
            norm(static_cast<const E*>(x) + row * x_stride, static_cast<const E*>(weight), eps,
                 static_cast<E*>(out) + row * out_stride, width);
        });
    });
}

void add_rms_norm(bool is_bf16, const void* x, const void* residual, const void* weight, float eps, void* out,
                  void* sum, int64_t rows, int64_t width) {
    with_type(is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, width, [&](int64_t row) {
            const int64_t at = row * width;
            E* total = static_cast<E*>(sum) + at;
            add(static_cast<const E*>(x) + at, static_cast<const E*>(residual) + at, total, width);
            norm(total, static_cast<const E*>(weight), eps, static_cast<E*>(out) + at, width);
        });
    });
}

void rotary(bool is_bf16, const void* x, int64_t x_stride, int64_t head_stride, const void* cos, const void* sin,
            void* out, int64_t out_stride, int64_t out_head_stride, int64_t rows, int64_t heads, int64_t dim) {
    with_type(is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, heads * dim, [&](int64_t row) {
            const int64_t at = row * (dim / 2);
            for (int64_t h = 0; h < heads; h++)
                turn(static_cast<const E*>(x) + row * x_stride + h * head_stride, static_cast<const E*>(cos) + at,
                     static_cast<const E*>(sin) + at, static_cast<E*>(out) + row * out_stride + h * out_head_stride,
                     dim / 2);
        });
    });
}

void silu_mul(bool is_bf16, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t width) {
    with_type(is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, width, [&](int64_t row) {
            const E* from = static_cast<const E*>(gate_up) + row * stride;
            gate(from, from + width, static_cast<E*>(out) + row * width, width);
        });
    });
}

void store_kv(const Cache& cache, int64_t layer, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
              const int64_t* blocks, const int64_t* offsets, int64_t rows) {
    with_type(cache.is_bf16, [&](auto type) {
        using E = decltype(type);
        each_row(rows, cache.kv_heads * cache.dim, [&](int64_t row) {
            E* to = place<E>(cache, layer, blocks[row], offsets[row]);
            put_heads(cache, static_cast<const E*>(k) + row * k_stride, to);
            put_heads(cache, static_cast<const E*>(v) + row * v_stride, to + cache.kind);
        });
    });
}

void qkv_to_cache(const Cache& cache, int64_t layer, void* qkv, int64_t stride, int64_t heads, const void* q_weight,
                  const void* k_weight, float eps, const void* cos, const void* sin, const int64_t* blocks,
                  const int64_t* offsets, int64_t rows) {
    with_type(cache.is_bf16, [&](auto type) {
        using E = decltype(type);
        const int64_t dim = cache.dim, half = dim / 2;
        each_row(rows, (heads + 2 * cache.kv_heads) * dim, [&](int64_t row) {
            E* q = static_cast<E*>(qkv) + row * stride;
            E* k = q + heads * dim;
            const E *c = static_cast<const E*>(cos) + row * half, *s = static_cast<const E*>(sin) + row * half;
            E* to = place<E>(cache, layer, blocks[row], offsets[row]);
            turn_heads(q, static_cast<const E*>(q_weight), eps, c, s, q, dim, heads, dim);
            turn_heads(k, static_cast<const E*>(k_weight), eps, c, s, to, cache.head, cache.kv_heads, dim);
            put_heads(cache, k + cache.kv_heads * dim, to + cache.kind);
        });
    });
}

}  // namespace penstock

using penstock::Cache;

extern "C" {

void penstock_rms_norm(int64_t is_bf16, const void* x, int64_t x_stride, const void* weight, float eps, void* out,
                       int64_t rows, int64_t width) {
    penstock::rms_norm(is_bf16, x, x_stride, weight, eps, out, width, rows, width);
}

void penstock_add_rms_norm(int64_t is_bf16, const void* x, const void* residual, const void* weight, float eps,
                           void* out, void* sum, int64_t rows, int64_t width) {
    penstock::add_rms_norm(is_bf16, x, residual, weight, eps, out, sum, rows, width);
}

void penstock_rotary(int64_t is_bf16, const void* x, int64_t x_stride, int64_t head_stride, const void* cos,
                     const void* sin, void* out, int64_t rows, int64_t heads, int64_t dim) {
    penstock::rotary(is_bf16, x, x_stride, head_stride, cos, sin, out, heads * dim, dim, rows, heads, dim);
}

void penstock_silu_mul(int64_t is_bf16, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t width) {
    penstock::silu_mul(is_bf16, gate_up, stride, out, rows, width);
}

void penstock_store_kv(const Cache* cache, const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                       const int64_t* blocks, const int64_t* offsets, int64_t rows) {
    penstock::store_kv(*cache, 0, k, k_stride, v, v_stride, blocks, offsets, rows);
}

void penstock_qkv_to_cache(const Cache* cache, void* qkv, int64_t stride, int64_t heads, const void* q_weight,
                           const void* k_weight, float eps, const void* cos, const void* sin, const int64_t* blocks,
                           const int64_t* offsets, int64_t rows) {
    penstock::qkv_to_cache(*cache, 0, qkv, stride, heads, q_weight, k_weight, eps, cos, sin, blocks, offsets, rows);
}
}
