// How K and V of one block of the cache are multiplied with queries, and queries' weights.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention.h"
#include "lanes.h"
#include "pack.h"
#include "tiles.h"
#include "vec.h"

namespace penstock {
namespace {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Sums of R queries, of 16 lanes each, that are in registers together for each of them.
template <int R>
#if defined(__AVX512F__)
constexpr int ACROSS = 4;
#else
constexpr int ACROSS = R == 1 ? 4 : R <= 3 ? 2 : 1;
#endif

// Products are made of units of 32 bits: one float, two bfloat16, or two whole numbers of 16 bits. EACH is how many, and
// WORDS how many of 32 bits what is multiplied with a unit has.
struct Single {
    static constexpr int EACH = 1, WORDS = 1;
    static f32x16 value(f32x16 sum) { return sum; }
    static f32x16 madd(f32x16 sum, const uint32_t* a, f32x16 b) {
        float x;
        std::memcpy(&x, a, 4);
        return fma(splat(x), b, sum);
    }
    // 32 weights, 2^x, as units; returns the sum of `sum` and of them in 16 parts.
    static f32x16 put_weights(f32x16 x, f32x16 y, uint32_t* to, f32x16 sum) {
        x = exp2(x), y = exp2(y);
        store(reinterpret_cast<float*>(to), x);
        store(reinterpret_cast<float*>(to) + 16, y);
        return sum + (x + y);
    }
};

#ifdef __AVX512BF16__
struct Pair {
    static constexpr int EACH = 2, WORDS = 1;
    static f32x16 value(f32x16 sum) { return sum; }
    static f32x16 madd(f32x16 sum, const uint32_t* a, f32x16 b) {
        int x;
        std::memcpy(&x, a, 4);
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32(x), (__m512bh)b);
    }
    static f32x16 put_weights(f32x16 x, f32x16 y, uint32_t* to, f32x16 sum) {
        const __m512bh weights = _mm512_cvtne2ps_pbh(rough_exp2(y), rough_exp2(x));
        std::memcpy(to, &weights, sizeof weights);
        return _mm512_dpbf16_ps(sum, weights, (__m512bh)_mm512_set1_epi16(0x3f80));  // times 1
    }
};
#else
// Bfloat16 is widened as it is multiplied, and what it is multiplied with before.
struct Pair {
    static constexpr int EACH = 2, WORDS = 2;
    static f32x16 value(f32x16 sum) { return sum; }
    PENSTOCK_INLINE static f32x16 madd(f32x16 sum, const uint32_t* a, f32x16 b) {
        const float* x = reinterpret_cast<const float*>(a);
        return fma(splat(x[1]), second_of_two(b), fma(splat(x[0]), first_of_two(b), sum));
    }
    PENSTOCK_INLINE static f32x16 put_weights(f32x16 x, f32x16 y, uint32_t* to, f32x16 sum) {
        x = rough_exp2(x), y = rough_exp2(y);
        store(reinterpret_cast<float*>(to), x);
        store(reinterpret_cast<float*>(to) + 16, y);
        return sum + (x + y);
    }
};
#endif

// Values of 8 bits are multiplied with what has been made whole numbers too, of 16 bits, and products are summed up in 32,
// without rounding.
struct Whole {
    static constexpr int EACH = 2, WORDS = 1;
    PENSTOCK_INLINE static f32x16 madd(f32x16 sum, const uint32_t* a, f32x16 b) {
        int x;
        std::memcpy(&x, a, 4);
        return as<f32x16>(dot_i16(as<i32x16>(sum), as<i16x32>(splat_i32(x)), as<i16x32>(b)));
    }
    PENSTOCK_INLINE static f32x16 value(f32x16 sum) { return to_f32(as<i32x16>(sum)); }

    // 16 numbers times `inverse` as 8 units.
    PENSTOCK_INLINE static void put(f32x16 x, float inverse, uint32_t* to) {
        store_i16(reinterpret_cast<int16_t*>(to), to_whole(x * splat(inverse)));
    }

    // What the largest of numbers becomes, so that no sum over `dim` of them overflows.
    static float largest(int64_t dim) { return static_cast<float>(std::min<int64_t>(32767, 2147483647 / (127 * dim))); }
};

template <class E>
using UnitOf = std::conditional_t<std::is_same_v<E, bf16>, Pair, std::conditional_t<std::is_same_v<E, int8_t>, Whole, Single>>;

// Whether the cache has values of 8 bits, with scales.
template <class E>
constexpr bool SCALED = std::is_same_v<E, int8_t>;

// Whether a query is not what units are multiplied with as it is.
template <class E>
constexpr bool WIDENED = sizeof(E) * UnitOf<E>::EACH != 4 || UnitOf<E>::WORDS != 1;

// Whether products with the cache's values are made in tiles: of up to 16 queries with K as it lies in the cache, of more
// with a packed block. Bits are the same (tiles.h).
template <class E>
#if defined(PENSTOCK_TILES)
constexpr bool IN_TILES = std::is_same_v<E, bf16>;
#else
constexpr bool IN_TILES = false;
#endif

// 16 units, or up to 16 and zeros.
template <class E>
inline f32x16 units_at(const E* from) {
    if constexpr (SCALED<E>)
        return as<f32x16>(widen32(from));
    else
        return load(reinterpret_cast<const float*>(from));
}
template <class E>
inline f32x16 units_at(const E* from, int64_t units) {
    if constexpr (SCALED<E>)
        return as<f32x16>(widen32(from, 2 * units));
    else
        return load_units(from, units);
}

// One head's K and V of a block in the cache, as far as the sequence has come.
template <class E>
struct Source {
    const E *keys, *values;
    int64_t stride, dim, value_dim;  // from token to token; of a head's K and V
    int count;            // tokens that are there
    int64_t next;         // from here to the block that will be visited next, 0 where there is none

    // 16 units of 16 tokens, as columns of a unit each; tokens that are not there are 0.
    PENSTOCK_INLINE void keys_at(int64_t token, int64_t unit, f32x16 (&columns)[16]) const {
        constexpr int EACH = UnitOf<E>::EACH;
        const E* from = keys + token * stride + unit * EACH;
        const int64_t units = dim / EACH - unit;
        if (token + 16 <= count && units >= 16) {
#ifndef __AVX512F__
            if constexpr (!SCALED<E>) return transpose(from, stride * static_cast<int64_t>(sizeof(E)), columns);
#endif
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++) columns[r] = units_at(from + r * stride);
        } else {
            for (int r = 0; r < 16; r++)
                columns[r] = token + r < count ? units_at(from + r * stride, units) : f32x16{};
        }
        transpose(columns);
    }

    // N vectors of units from dimension `d` on, of which `WHOLE` are there; a unit is of as many tokens as it has elements.
    template <int N, bool WHOLE = false>
    PENSTOCK_INLINE void values_at(int64_t token, int64_t d, f32x16 (&columns)[N]) const {
        const E* row = values + token * stride + d;
        if constexpr (UnitOf<E>::EACH == 2) {
            if constexpr (WHOLE)
                interleave(row, row + stride, 16 * N, columns);
            else
                interleave(token < count ? row : nullptr, token + 1 < count ? row + stride : nullptr, value_dim - d, columns);
        } else {
            for (int n = 0; n < N; n++) {
                int64_t there = token < count ? value_dim - d - 16 * n : 0;
                columns[n] = there >= 16  ? load(row + 16 * n)
                             : there <= 0 ? f32x16{}
                                          : load(row + 16 * n, static_cast<int>(there));
            }
        }
    }

    // So many vectors to memory.
    PENSTOCK_INLINE void put_values(int64_t token, int64_t d, int64_t vectors, float* to) const {
        const bool there = token + UnitOf<E>::EACH <= count && d + vectors * 16 <= value_dim;
        int64_t v = 0;
        for (; v + 2 <= vectors; v += 2, d += 32) {
            f32x16 columns[2];
            there ? values_at<2, true>(token, d, columns) : values_at(token, d, columns);
            store(to + v * 16, columns[0]);
            store(to + v * 16 + 16, columns[1]);
        }
        if (v < vectors) {
            f32x16 columns[1];
            values_at(token, d, columns);
            store(to + v * 16, columns[0]);
        }
    }

    // Have some tokens of the next block's K or V on their way while this one's are computed with.
    void fetch(const E* kind, int64_t from, int64_t to) const {
        if (next == 0) return;
        for (int64_t token = from; token < to; token++)
            for (int64_t d = 0; d < dim; d += 64 / static_cast<int64_t>(sizeof(E)))
                __builtin_prefetch(kind + next + token * stride + d, 0, 2);
    }
};

// Asks for what will be read next, V while K is computed with and the next block's K meanwhile V is: a token at a time,
// evenly, since memory does nothing between bursts.
template <class E>
class Ahead {
   public:
    // For `tokens` from the first on; `each` is the work between a token and the next.
    Ahead(const Source<E>& source, const E* first, int64_t tokens, int64_t each)
        : token_(first), stride_(source.stride), dim_(source.dim), each_(each), left_(tokens) {}

    PENSTOCK_INLINE void done(int64_t work) {
        for (owed_ += work; owed_ >= each_ && left_ > 0; owed_ -= each_, left_--, token_ += stride_)
            for (int64_t d = 0; d < dim_; d += 64 / static_cast<int64_t>(sizeof(E))) __builtin_prefetch(token_ + d, 0, 2);
    }

   private:
    const E* token_;
    const int64_t stride_, dim_, each_;
    int64_t left_, owed_ = 0;
};

// The same in working memory: K as [unit][token], V as [unit of tokens][dimension], for many queries to be read from.
template <class E>
struct Packed {
    using U = UnitOf<E>;
    float *keys, *values;
    int64_t units, width;

    static int64_t floats(int64_t dim, int64_t width) { return BLOCK_TOKENS * (dim + width) / U::EACH; }

    Packed(float* memory, int64_t dim, int64_t width)
        : keys(memory), values(memory + BLOCK_TOKENS * dim / U::EACH), units(dim / U::EACH), width(width) {}

    void fill(const Source<E>& source) {
        for (int64_t unit = 0; unit < units; unit += 16) {
            for (int64_t token = 0; token < BLOCK_TOKENS; token += 16) {
                f32x16 columns[16];
                source.keys_at(token, unit, columns);
                if (unit == 0) source.fetch(source.keys, token, token + 16);
                float* to = keys + unit * BLOCK_TOKENS + token;
                int64_t there = std::min<int64_t>(16, units - unit);
                for (int64_t c = 0; c < there; c++) store(to + c * BLOCK_TOKENS, columns[c]);
            }
        }
        for (int64_t token = 0; token < BLOCK_TOKENS; token += U::EACH) {
            float* to = values + token / U::EACH * width;
            source.fetch(source.values, token, token + U::EACH);
            source.put_values(token, 0, width / LANES, to);
        }
    }
};

// Scores of queries with a block's tokens, [query][token].
typedef float Scores[BLOCK_TOKENS];

// q . k of R queries and N * 16 tokens from `token` on, summed over units in order.
template <class E, int R, int N>
inline void multiply_some_keys(const Packed<E>& block, const uint32_t* const* q, int64_t token, Scores* to) {
    f32x16 sums[R][N];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) sums[r][n] = f32x16{};
    for (int64_t unit = 0; unit < block.units; unit++) {
        f32x16 columns[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) columns[n] = load(block.keys + unit * BLOCK_TOKENS + token + 16 * n);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                sums[r][n] = UnitOf<E>::madd(sums[r][n], q[r] + unit * UnitOf<E>::WORDS, columns[n]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int n = 0; n < N; n++) store(to[r] + token + 16 * n, UnitOf<E>::value(sums[r][n]));
}

// Of the first `seen` tokens, perhaps of more; 0 for the others.
template <class E, int R, int N = 2>
inline void multiply_keys(const Packed<E>& block, const uint32_t* const* q, int64_t seen, Scores* to) {
    if constexpr (ACROSS<R> < BLOCK_TOKENS / 16) {
        int64_t token = 0;
        for (; token < seen; token += 16 * ACROSS<R>) multiply_some_keys<E, R, ACROSS<R>>(block, q, token, to);
        for (int r = 0; r < R; r++) std::fill(to[r] + token, to[r] + BLOCK_TOKENS, 0.0f);
        return;
    } else if constexpr (N < BLOCK_TOKENS / 16) {
        if (seen > 16 * N) return multiply_keys<E, R, N + 1>(block, q, seen, to);
    }
    multiply_some_keys<E, R, N>(block, q, 0, to);
    for (int r = 0; r < R; r++) std::fill(to[r] + 16 * N, to[r] + BLOCK_TOKENS, 0.0f);
}

template <class E, int R>
PENSTOCK_INLINE void multiply_keys(const Source<E>& block, const uint32_t* const* q, int64_t, Scores* to) {
    const int64_t units = block.dim / UnitOf<E>::EACH;
    f32x16 scores[R][4];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < 4; n++) scores[r][n] = f32x16{};
    Ahead<E> ahead(block, block.values, block.count, ceil_div(units, 16) * 16);
    for (int64_t unit = 0; unit < units; unit += 16) {
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            f32x16 columns[16];
            block.keys_at(16 * n, unit, columns);
            if (units - unit >= 16) {
#pragma GCC unroll 16
                for (int c = 0; c < 16; c++) {
                    for (int r = 0; r < R; r++)
                        scores[r][n] = UnitOf<E>::madd(scores[r][n], q[r] + (unit + c) * UnitOf<E>::WORDS, columns[c]);
                    if (c % 4 == 3) ahead.done(4 * 16);
                }
            } else {
                ahead.done(16 * 16);
                for (int c = 0; c < units - unit; c++)
                    for (int r = 0; r < R; r++)
                        scores[r][n] = UnitOf<E>::madd(scores[r][n], q[r] + (unit + c) * UnitOf<E>::WORDS, columns[c]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < 4; n++) store(to[r] + 16 * n, UnitOf<E>::value(scores[r][n]));
}

// Whole numbers need not become columns first: each token's products are summed up by themselves, and then across.
template <class E, int R>
PENSTOCK_INLINE void multiply_keys(const Source<int8_t>& block, const uint32_t* const* q, int64_t, Scores* to) {
    const int64_t steps = ceil_div(block.dim, 32);
    Ahead<int8_t> ahead(block, block.values, block.count, steps);
    for (int64_t token = 0; token < BLOCK_TOKENS; token += 16) {
        i32x16 fours[R][4];
        for (int f = 0; f < 4; f++) {
            i32x16 sums[R][4] = {};
            const int8_t* from = block.keys + (token + 4 * f) * block.stride;
            for (int64_t step = 0; step < steps; step++) {
                i16x32 rows[4];
                for (int t = 0; t < 4; t++) rows[t] = widen32(from + t * block.stride + 32 * step, block.dim - 32 * step);
                for (int r = 0; r < R; r++) {
                    const i16x32 x = get<i16x32>(q[r] + 16 * step);
                    for (int t = 0; t < 4; t++) sums[r][t] = dot_i16(sums[r][t], x, rows[t]);
                }
                ahead.done(4);
            }
            for (int r = 0; r < R; r++) fours[r][f] = sum_fours(sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
        }
        for (int r = 0; r < R; r++) {
            const i32x16 sums = sum_groups(fours[r][0], fours[r][1], fours[r][2], fours[r][3]);
            store(to[r] + token, to_f32(sums));
        }
    }
}

template <int N, class E>
inline void values_at(const Packed<E>& block, int64_t token, int64_t d, f32x16 (&columns)[N]) {
    for (int n = 0; n < N; n++) columns[n] = load(block.values + token / UnitOf<E>::EACH * block.width + d + 16 * n);
}

template <int N, class E>
inline void values_at(const Source<E>& block, int64_t token, int64_t d, f32x16 (&columns)[N]) {
    block.values_at(token, d, columns);
}

// Nothing is left to ask for where a block has been packed.
struct NoneAhead {
    void done(int64_t) {}
};
template <class E>
NoneAhead values_ahead(const Packed<E>&, int64_t) {
    return {};
}
template <class E>
Ahead<E> values_ahead(const Source<E>& block, int64_t width) {
    return {block, block.keys + block.next, block.next ? BLOCK_TOKENS : 0, width};
}

}  // namespace
}  // namespace penstock
