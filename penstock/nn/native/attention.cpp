#include "attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "helpers.h"
#include "lanes.h"
#include "pack.h"
#include "pool.h"
#include "tiles.h"
#include "vec.h"

namespace penstock {
namespace {

constexpr int SPLIT_BLOCKS = 16;  // positions are summed up in pieces of so many blocks, then the pieces are
constexpr int TILE = 256;         // queries (row and head) for which a block of K and V is packed once
constexpr int SHARING = 1024;     // the same where all heads share K and V: those of a few rows of many heads
constexpr int64_t APART = 8 << 20;  // floats of sums up to which threads share a long context for many queries
constexpr int FEW = 4;            // queries for which threads share a long context
constexpr int MOST = 6;           // queries whose sums are in registers together
constexpr int64_t PACKING = 6;    // queries that reading and packing a block costs as much as
constexpr int64_t ALONE = 64;     // queries times blocks that a thread computes before another is worth waking
constexpr float SLACK = 8;        // powers of 2 that a weight may reach before sums are rescaled to the largest score
constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr float LEAST = 1e-30f;  // numbers of which the largest is less become 0: its inverse may be none

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

// Weighted sums of V over some positions, of several queries: sum exp(score - most) v, and of the weights, as 16 parts.
struct Sums {
    float *most, *weight, *value;  // [queries], [queries, 16], [queries, width]

    static int64_t floats(int64_t queries, int64_t width) { return queries * (32 + width); }

    Sums(float* memory, int64_t queries) : most(memory), weight(memory + 16 * queries), value(memory + 32 * queries) {}

    void clear(int64_t queries, int64_t width) const {
        std::fill(most, most + queries, NOTHING);
        std::fill(weight, weight + queries * (16 + width), 0.0f);
    }
};

// Add one query's sums to those of the positions before.
void merge(const Sums& total, const Sums& part, int64_t query, int64_t width) {
    const float before = total.most[query], now = part.most[query];
    if (now == NOTHING) return;
    const f32x16 most = max(splat(before), splat(now));
    const f32x16 keep = exp2(splat(before) - most), add = exp2(splat(now) - most);
    total.most[query] = most[0];
    auto combine = [&](float* a, const float* b) { store(a, fma(load(a), keep, load(b) * add)); };
    combine(total.weight + 16 * query, part.weight + 16 * query);
    for (int64_t d = 0; d < width; d += 16) combine(total.value + query * width + d, part.value + query * width + d);
}

// What all items of a call share.
template <class E>
struct Call {
    const AttentionBatch& batch;
    const Cache& cache;
    const E* q;
    int64_t q_stride;
    E* out;
    float scale;  // with log2(e), since weights are powers of 2
    int64_t window, group, q_width, width;  // of a query and of sums, filled up to whole vectors
};

// What a thread computes at once: some heads' splits [from, to) of a tile, which is some rows of a sequence. Where
// `shared` is not negative, other items compute the tile's other splits, each leaves its sums, and the one that ends
// last adds them up.
struct Item {
    int64_t cost, span, row, rows, head, heads, from, to, shared;
    PostedSplit* posted = nullptr;  // where others may take it
};

// A tile whose splits are computed apart; their sums lie one after the other.
struct Shared {
    int64_t place, first, splits;
};

// Queries are numbered row * group + head of the group, for each head of K and V by itself. Rows are of E, and the cache of C.
template <class E, class C>
class Tile {
    using U = UnitOf<C>;

   public:
    Tile(const Call<E>& call, const Item& item, float* scratch)
        : call_(call),
          cache_(call.cache),
          span_(call.batch.spans[item.span]),
          item_(item),
          position_(span_.start + item.row),
          queries_(item.rows * call.group),
          packed_(scratch, cache_.dim, call.width),
          wide_(scratch + Packed<C>::floats(cache_.dim, call.width)),
          q_scales_(wide_ + (WIDENED<C> ? item.heads * queries_ * call.q_width : 0)) {
        if constexpr (IN_TILES<C>) {
            for (int64_t h = 0; h < item.heads; h++) put_queries(h);
        } else if constexpr (SCALED<C>) {
            for (int64_t h = 0; h < item.heads; h++)
                for (int64_t i = 0; i < queries_; i++) q_scales_[h * queries_ + i] = put_query(query(h, i), wide(h, i));
        } else if constexpr (WIDENED<C>) {
            for (int64_t h = 0; h < item.heads; h++)
                for (int64_t i = 0; i < queries_; i++)
                    for (int64_t d = 0; d < cache_.dim; d++) wide(h, i)[d] = widen(query(h, i)[d]);
        }
    }

    // Of working memory.
    static int64_t floats(const Call<E>& call, int64_t queries, int64_t heads) {
        return Packed<C>::floats(call.cache.dim, call.width) +
               heads * queries * ((WIDENED<C> ? call.q_width : 0) + (SCALED<C> ? 1 : 0)) +
               (IN_TILES<C> ? heads * std::max<int64_t>(queries, LANES) * call.cache.dim / U::EACH : 0);
    }

    int64_t sums_size() const { return Sums::floats(queries_, call_.width); }

    // Each split by itself and then together, in order. `total` and `part` have room for every head's sums, one after
    // the other; `part` is where a split is summed up that is not the first.
    void sum(float* total, float* part) {
        for (int64_t split = item_.from; split < item_.to; split++) {
            float* sums = split == item_.from ? total : part;
            for (int64_t h = 0; h < item_.heads; h++) at(sums, h).clear(queries_, call_.width);
            add_split(split, sums);
            if (sums == total) continue;
            for (int64_t h = 0; h < item_.heads; h++)
                for (int64_t i = 0; i < queries_; i++) merge(at(total, h), at(part, h), i, call_.width);
        }
    }

    Sums at(float* sums, int64_t head) const { return Sums(sums + head * sums_size(), queries_); }

    void write(float* total) const {
        const int64_t dim = cache_.value_dim, out_stride = call_.batch.heads * dim;
        for (int64_t h = 0; h < item_.heads; h++) {
            const Sums sums = at(total, h);
            for (int64_t i = 0; i < queries_; i++) {
                const f32x16 share = splat(1.0f / sum_lanes(load(sums.weight + 16 * i)));
                E* to = call_.out + (span_.row + item_.row + i / call_.group) * out_stride +
                        ((item_.head + h) * call_.group + i % call_.group) * dim;
                const float* from = sums.value + i * call_.width;
                for (int64_t d = 0; d < dim; d += 32) {
                    f32x16 values[2] = {load(from + d)};
                    if (d + 16 < call_.width) {
                        values[1] = load(from + d + 16);
                        if constexpr (U::EACH == 2) in_order(values);  // as V was interleaved
                    }
                    for (int64_t n = 0; n < 2 && d + 16 * n < dim; n++) {
                        const int64_t left = dim - d - 16 * n;
                        if (left >= 16)
                            store(to + d + 16 * n, values[n] * share);
                        else
                            store(to + d + 16 * n, values[n] * share, static_cast<int>(left));
                    }
                }
            }
        }
    }

   private:
    const E* query(int64_t h, int64_t i) const {
        return call_.q + (span_.row + item_.row + i / call_.group) * call_.q_stride +
               ((item_.head + h) * call_.group + i % call_.group) * cache_.dim;
    }

    float* wide(int64_t h, int64_t i) const { return wide_ + (h * queries_ + i) * call_.q_width; }

    // A query as units. Returns what a product with it is to be multiplied by, which is no number where the query is none.
    float put_query(const E* from, float* to) const {
        const int64_t dim = cache_.dim;
        f32x16 most{}, nothing{};
        for (int64_t d = 0; d < dim; d += 16) {
            const f32x16 x = d + 16 <= dim ? load(from + d) : load(from + d, static_cast<int>(dim - d));
            store(to + d, x);
            most = max(most, max(x, -x));
            nothing = fma(x, f32x16{}, nothing);
        }
        const float top = max_lanes(most)[0], largest = U::largest(dim), inverse = top < LEAST ? 0.0f : largest / top;
        // a unit is half as long as two floats, so nothing is overwritten that is still to be read
        for (int64_t d = 0; d < dim; d += 16) U::put(load(to + d), inverse, reinterpret_cast<uint32_t*>(to) + d / 2);
        return top / largest + sum_lanes(nothing);
    }

    int64_t slot(int64_t block) const {
        return span_.place >= 0 ? span_.place + block : call_.batch.ids[block - 1 - span_.place];
    }

    const C* keys(int64_t h, int64_t block) const {
        return static_cast<const C*>(cache_.values) + slot(block) * cache_.block + (item_.head + h) * cache_.head;
    }

    // The scales of a block's tokens, of those that are not there 0.
    void take_scales(int64_t h, int64_t block, int64_t count) {
        const float* from = cache_.scales + slot(block) * cache_.scale_block + (item_.head + h) * cache_.scale_head;
        for (auto* to : {&key_scales_, &value_scales_}) {
            if (cache_.scale_token == 1) {
                std::memcpy(*to, from, BLOCK_TOKENS * sizeof(float));
            } else {
                for (int64_t token = 0; token < count; token++) (*to)[token] = from[token * cache_.scale_token];
            }
            std::fill(*to + count, *to + BLOCK_TOKENS, 0.0f);
            from += cache_.scale_kind;
        }
    }

    void add_split(int64_t split, float* sums) {
        const int64_t end = std::min((split + 1) * SPLIT_BLOCKS, ceil_div(position_ + item_.rows, BLOCK_TOKENS));
        const int64_t lowest = call_.window ? std::max<int64_t>(0, position_ - call_.window + 1) / BLOCK_TOKENS : 0;
        for (int64_t block = std::max(split * SPLIT_BLOCKS, lowest); block < end; block++) {
            const int64_t left = std::min<int64_t>(BLOCK_TOKENS, position_ + item_.rows - block * BLOCK_TOKENS);
            for (int64_t h = 0; h < item_.heads; h++) {
                const C* here = keys(h, block);
                const C* next = h + 1 < item_.heads ? keys(h + 1, block) : block + 1 < end ? keys(0, block + 1) : here;
                const Source<C> source{here,       here + cache_.kind, cache_.token,           cache_.dim,
                                       cache_.value_dim, static_cast<int>(left), next - here};
                if constexpr (SCALED<C>) take_scales(h, block, left);
                visit(h, block, source, at(sums, h));
            }
        }
    }

    void visit(int64_t h, int64_t block, const Source<C>& source, const Sums& sums) {
        const int64_t first = block * BLOCK_TOKENS;
        // rows that see some of it
        const int64_t from = std::max<int64_t>(0, first - position_);
        const int64_t to =
            call_.window ? std::min(item_.rows, first + BLOCK_TOKENS - 1 + call_.window - position_) : item_.rows;
        const int64_t begin = from * call_.group, end = to * call_.group;
        if constexpr (IN_TILES<C>) return visit_in_tiles(h, begin, end, first, source, sums);
        if (queries_ <= FEW)  // which read K and V where they are
            return dispatch<FEW>(end - begin, [&](auto count) { attend<count()>(h, begin, first, source, sums); });
        packed_.fill(source);
        const int64_t groups = ceil_div(end - begin, MOST);  // about equal ones: a small one is slow
        for (int64_t g = 0, i = begin; g < groups; g++) {
            const int64_t next = begin + (end - begin) * (g + 1) / groups;
            dispatch<MOST>(next - i, [&](auto count) { attend<count()>(h, i, first, packed_, sums); });
            i = next;
        }
    }

#if defined(PENSTOCK_TILES)
    // --- in tiles

    // A head's queries: few as columns of words, [words][16], and more as rows.
    uint32_t* tiled_queries(int64_t h) const {
        const int64_t words = cache_.dim / U::EACH;
        return reinterpret_cast<uint32_t*>(wide_) + h * std::max<int64_t>(queries_, LANES) * words;
    }

    void put_queries(int64_t h) const {
        const int64_t words = cache_.dim / U::EACH;
        uint32_t* to = tiled_queries(h);
        if (queries_ > TILE_ROWS) {
            for (int64_t i = 0; i < queries_; i++) std::memcpy(to + i * words, query(h, i), words * 4);
            return;
        }
        std::fill(to, to + words * LANES, 0u);
        for (int64_t i = 0; i < queries_; i++)
            for (int64_t word = 0; word < words; word++) std::memcpy(to + word * LANES + i, query(h, i) + 2 * word, 4);
    }

    void visit_in_tiles(int64_t h, int64_t begin, int64_t end, int64_t first, const Source<C>& source, const Sums& sums) {
        alignas(64) Scores scores[2 * TILE_ROWS];
        if (queries_ <= TILE_ROWS) {
            multiply_keys_in_tiles(h, source, scores);
            weigh_all(begin, end - begin, first, scores + begin, sums);
            return add_as_it_lies(begin, static_cast<int>(end - begin), source, sums);
        }
        packed_.fill(source);
        const int64_t words = packed_.units, strips = ceil_div(end - begin, 2 * TILE_ROWS);
        for (int64_t t = 0, i = begin; t < strips; t++) {
            const int64_t next = begin + (end - begin) * (t + 1) / strips, rows = next - i;
            const char* q = reinterpret_cast<const char*>(tiled_queries(h) + i * words);
            const Line* keys = reinterpret_cast<const Line*>(packed_.keys);
            const int together = tile_groups(rows);
            for (int g = 0; g < BLOCK_TOKENS / LANES; g += together)
                add_words<false>(registers_, rows, together, {q, words * 4, keys + g, BLOCK_TOKENS / LANES, 0, nullptr}, words,
                                 scores[0] + g * LANES, BLOCK_TOKENS, true);
            weigh_all(i, rows, first, scores, sums);
            add_packed(i, static_cast<int>(rows), sums);
            i = next;
        }
    }

    // Scores of all of few queries, with K as it lies there.
    void multiply_keys_in_tiles(int64_t h, const Source<C>& source, Scores* scores) {
        alignas(64) float columns[BLOCK_TOKENS][LANES];
        const int64_t words = cache_.dim / U::EACH, stride = source.stride * static_cast<int64_t>(sizeof(C));
        multiply_columns(registers_, reinterpret_cast<const char*>(source.keys), stride,
                         reinterpret_cast<const Line*>(tiled_queries(h)), words, columns[0]);
        const __m512i rows = _mm512_mullo_epi32(as<__m512i>(lane_numbers()), _mm512_set1_epi32(LANES));
        for (int64_t i = 0; i < queries_; i++)
            for (int token = 0; token < BLOCK_TOKENS; token += LANES)
                store(scores[i] + token, _mm512_i32gather_ps(rows, columns[token] + i, 4));
    }

    void weigh_all(int64_t i, int64_t rows, int64_t first, Scores* scores, const Sums& sums) {
        for (int64_t r = 0; r < rows; r++) {
            hide(scores[r], position(i + r) - first);
            weigh(scores[r], i + r, sums, weights_[r]);
        }
    }

    // Adds a block's V, which is packed, for up to 32 queries from the i-th on.
    void add_packed(int64_t i, int rows, const Sums& sums) {
        const Line* values = reinterpret_cast<const Line*>(packed_.values);
        const int groups = static_cast<int>(call_.width / LANES), most = tile_groups(rows);
        for (int g = 0; g < groups; g += most)
            add_words<false>(registers_, rows, std::min(most, groups - g),
                             {reinterpret_cast<const char*>(weights_), sizeof weights_[0], values + g, groups, 0, nullptr},
                             BLOCK_TOKENS / U::EACH, sums.value + i * call_.width + g * LANES, call_.width, false);
    }

    // The same of V as it lies in the cache, tile by tile; the next block's K and V are asked for meanwhile.
    void add_as_it_lies(int64_t i, int rows, const Source<C>& source, const Sums& sums) {
        constexpr int64_t MOST = 4, TOKENS = TILE_WORDS * U::EACH;
        alignas(64) Line lines[TILE_WORDS * MOST];
        const int64_t groups = call_.width / LANES, tokens = source.next ? BLOCK_TOKENS : 0, each = ceil_div(groups, MOST);
        Ahead<C> keys(source, source.keys + source.next, tokens, each), values(source, source.values + source.next, tokens, each);
        for (int64_t g = 0; g < groups; g += MOST) {
            const int64_t some = std::min(MOST, groups - g);
            for (int64_t token = 0; token < BLOCK_TOKENS; token += TOKENS) {
                for (int64_t word = 0; word < TILE_WORDS; word++) {
                    const int64_t at = token + word * U::EACH;
                    keys.done(U::EACH);
                    values.done(U::EACH);
                    source.put_values(at, g * LANES, some, reinterpret_cast<float*>(lines + word * some));
                }
                const char* weights = reinterpret_cast<const char*>(weights_[0] + token / U::EACH);
                add_words<false>(registers_, rows, some, {weights, sizeof weights_[0], lines, some, 0, nullptr}, TILE_WORDS,
                                 sums.value + i * call_.width + g * LANES, call_.width, false);
            }
        }
    }

    alignas(64) uint32_t weights_[2 * TILE_ROWS][BLOCK_TOKENS / U::EACH];
    TileRegisters registers_;
#else
    void put_queries(int64_t) const {}
    void visit_in_tiles(int64_t, int64_t, int64_t, int64_t, const Source<C>&, const Sums&) {}
#endif

    int64_t position(int64_t i) const { return position_ + i / call_.group; }

    // f(count), which is at most R, as a constant.
    template <int R, class F>
    static void dispatch(int64_t count, const F& f) {
        if constexpr (R > 1) {
            if (count < R) return dispatch<R - 1>(count, f);
        }
        f(std::integral_constant<int, R>{});
    }

    // A block's part of R queries from the i-th on.
    template <int R, class B>
    void attend(int64_t h, int64_t i, int64_t first, const B& block, const Sums& sums) {
        const uint32_t* units[R];
        for (int r = 0; r < R; r++) {
            const void* q = query(h, i + r);
            if constexpr (WIDENED<C>) q = wide(h, i + r);
            units[r] = static_cast<const uint32_t*>(q);
        }
        const int64_t seen = std::min<int64_t>(BLOCK_TOKENS, position(i + R - 1) + 1 - first);  // by the last of them
        alignas(64) Scores scores[R];
        multiply_keys<C, R>(block, units, seen, scores);
        alignas(64) uint32_t weights[R][BLOCK_TOKENS / U::EACH * U::WORDS];
        float factors[R];
        for (int r = 0; r < R; r++) {
            if constexpr (SCALED<C>) {
                const f32x16 q_scale = splat(q_scales_[h * queries_ + i + r]);
                for (int n = 0; n < BLOCK_TOKENS; n += 16)
                    store(scores[r] + n, load(scores[r] + n) * (load(key_scales_ + n) * q_scale));
            }
            hide(scores[r], position(i + r) - first);
            factors[r] = weigh(scores[r], i + r, sums, weights[r]);
            units[r] = weights[r];
        }
        int64_t d = 0;
        float* to = sums.value + i * call_.width;
        auto ahead = values_ahead(block, call_.width);
        constexpr int N = ACROSS<R>;
        for (; d + 16 * N <= call_.width; d += 16 * N) add_values<R, N>(block, units, factors, seen, d, to, ahead);
        if constexpr (N > 2)
            if (d + 32 <= call_.width) {
                add_values<R, 2>(block, units, factors, seen, d, to, ahead);
                d += 32;
            }
        if constexpr (N > 1)
            if (d < call_.width) add_values<R, 1>(block, units, factors, seen, d, to, ahead);
    }

    // Nothing is left of positions after the row's own, which is `at` counted from the block's first, and too far back.
    void hide(Scores& scores, int64_t at) const {
        const int64_t before = call_.window ? std::max<int64_t>(0, at + 1 - call_.window) : 0;
        if (at >= BLOCK_TOKENS - 1 && before == 0) return;
        for (int token = 0; token < BLOCK_TOKENS; token += 16) {
            const i32x16 tokens = lane_numbers() + token;
            const i32x16 hidden = (tokens > static_cast<int>(at)) | (tokens < static_cast<int>(before));
            store(scores + token, where(hidden, splat(NOTHING), load(scores + token)));
        }
    }

    // Scores become weights, as units: 2^(score - most), where `most` is near the largest score so far: it stays while
    // weights are small enough, so that sums are seldom rescaled. Returns what products with them are to be multiplied by.
    float weigh(const Scores& scores, int64_t i, const Sums& sums, uint32_t* to) const {
        const f32x16 scale = splat(call_.scale);
        f32x16 x[4];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) x[n] = load(scores + 16 * n);
        const f32x16 top = max(max(x[0], x[1]), max(x[2], x[3]));
        if (!below(fma(top, scale, -splat(sums.most[i])), SLACK)) raise(max_lanes(top * scale), i, sums);
        const f32x16 less = -splat(sums.most[i]);
        f32x16 sum = load(sums.weight + 16 * i);
        float factor = 1;
        if constexpr (SCALED<C>) {
            f32x16 most{};
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                const f32x16 weight = rough_exp2(fma(x[n], scale, less));
                x[n] = weight * load(value_scales_ + 16 * n);
                sum = fma(x[n], f32x16{}, sum + weight);  // where a scale is no number, neither is the sum
                most = max(most, x[n]);
            }
            const float largest = max_lanes(most)[0], inverse = largest < LEAST ? 0.0f : 32767.0f / largest;
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) U::put(x[n], inverse, to + 8 * n);
            factor = largest / 32767.0f;
        } else {
#pragma GCC unroll 2
            for (int n = 0; n < 4; n += 2)
                sum = U::put_weights(fma(x[n], scale, less), fma(x[n + 1], scale, less), to + 16 * n / U::EACH * U::WORDS, sum);
        }
        store(sums.weight + 16 * i, sum);
        return factor;
    }

    void raise(f32x16 top, int64_t i, const Sums& sums) const {
        const f32x16 before = splat(sums.most[i]), now = max(before, top);
        sums.most[i] = now[0];
        if (before[0] == NOTHING) return;  // sums are 0
        const f32x16 keep = exp2(before - now);
        float *weight = sums.weight + 16 * i, *value = sums.value + i * call_.width;
        store(weight, load(weight) * keep);
        for (int64_t d = 0; d < call_.width; d += 16) store(value + d, load(value + d) * keep);
    }

    template <int R, int N, class B, class Next>
    void add_values(const B& block, const uint32_t* const* weights, const float* factors, int64_t seen, int64_t d,
                    float* to, Next& ahead) const {
        f32x16 found[R][N];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int n = 0; n < N; n++)
                found[r][n] = SCALED<C> ? f32x16{} : load(to + r * call_.width + d + 16 * n);
        for (int64_t token = 0; token < seen; token += U::EACH) {
            f32x16 columns[N];
            values_at<N>(block, token, d, columns);
            ahead.done(16 * N * U::EACH);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int n = 0; n < N; n++)
                    found[r][n] = U::madd(found[r][n], weights[r] + token / U::EACH * U::WORDS, columns[n]);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
            for (int n = 0; n < N; n++) {
                float* sum = to + r * call_.width + d + 16 * n;
                store(sum, SCALED<C> ? fma(U::value(found[r][n]), splat(factors[r]), load(sum)) : found[r][n]);
            }
        }
    }

    const Call<E>& call_;
    const Cache& cache_;
    const Span& span_;
    const Item& item_;
    const int64_t position_, queries_;
    Packed<C> packed_;
    float *wide_, *q_scales_;
    alignas(64) float key_scales_[BLOCK_TOKENS], value_scales_[BLOCK_TOKENS];  // of the block that is visited
};

struct Work {
    std::vector<Item> items;  // the longest first
    std::vector<Shared> shared;
    int64_t cost = 0, floats = 0;  // all items'; of the sums that shared tiles leave
};

int64_t most_rows_of(int64_t group, bool latent) { return std::max<int64_t>(1, (latent ? SHARING : TILE) / group); }

// Whether so many queries that share K and V leave their sums of each split, so that no block is read twice.
bool is_apart(int64_t splits, int64_t queries, int64_t width) { return splits * Sums::floats(queries, width) <= APART; }

// In how many parts heads that share K and V are computed: in one, which reads each block once, unless threads had nothing
// to do then.
int64_t parts_of(const AttentionBatch& batch, int64_t width) {
    const int64_t most_rows = most_rows_of(batch.heads, true);
    int64_t tiles = 0, parts = 1;
    for (int64_t s = 0; s < batch.count; s++) {
        const Span& span = batch.spans[s];
        const int64_t splits = ceil_div(span.start + span.rows, BLOCK_TOKENS * SPLIT_BLOCKS);
        const bool apart = is_apart(splits, std::min(span.rows, most_rows) * batch.heads, width);
        tiles += ceil_div(span.rows, most_rows) * (apart ? splits : 1);
    }
    while (tiles * parts < threads() && batch.heads % (2 * parts) == 0) parts *= 2;
    return parts;
}

// Who computes what does not change what is computed, so it may depend on the number of threads.
void plan(const AttentionBatch& batch, int64_t kv_heads, int64_t window, int64_t group, int64_t width, bool latent,
          Work& work) {
    work.items.clear();
    work.shared.clear();
    work.cost = work.floats = 0;
    const int64_t most_rows = most_rows_of(group, latent);
    // heads that follow one another are neighbours in the cache: few rows read them together if there is enough to share
    const int64_t together = std::clamp<int64_t>(batch.count * kv_heads / (4 * threads()), 1, kv_heads);
    for (int64_t s = 0; s < batch.count; s++) {
        const Span& span = batch.spans[s];
        for (int64_t row = 0; row < span.rows; row += most_rows) {
            const int64_t rows = std::min(most_rows, span.rows - row), first = span.start + row, queries = rows * group;
            const int64_t to = ceil_div(first + rows, BLOCK_TOKENS);
            const int64_t from = window ? std::max<int64_t>(0, first - window + 1) / BLOCK_TOKENS : 0;
            const int64_t split_from = from / SPLIT_BLOCKS, splits = ceil_div(to, SPLIT_BLOCKS) - split_from;
            const bool few = queries <= FEW;
            const bool apart = splits > 1 && (few || (latent && is_apart(splits, queries, width)));
            const int64_t step = apart ? 1 : splits, heads = few ? together : 1;
            for (int64_t head = 0; head < kv_heads; head += heads) {
                const int64_t own = std::min(heads, kv_heads - head);
                if (apart) {
                    work.shared.push_back({work.floats, split_from, splits});
                    work.floats += splits * own * Sums::floats(queries, width);
                }
                for (int64_t split = split_from; split < split_from + splits; split += step) {
                    const int64_t end = std::min(to, (split + step) * SPLIT_BLOCKS);
                    const int64_t cost = (end - std::max(from, split * SPLIT_BLOCKS)) * own * (queries + PACKING);
                    const int64_t shared = apart ? static_cast<int64_t>(work.shared.size()) - 1 : -1;
                    work.cost += cost;
                    work.items.push_back({cost, s, row, rows, head, own, split, split + step, shared, nullptr});
                }
            }
        }
    }
    std::sort(work.items.begin(), work.items.end(), [](const Item& a, const Item& b) { return a.cost > b.cost; });
}

// Memory that a thread keeps, from the start of a cache line.
float* take(std::vector<float>& memory, int64_t floats) {
    if (static_cast<int64_t>(memory.size()) < floats + 16) memory.resize(floats + 16);
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (-address & 63) / 4;
}

// One more split of a tile has its sums, at `left`; with the last of them they are added up.
template <class E, class C>
void finish(Tile<E, C>& tile, const Call<E>& call, const Item& item, const Shared& shared, float* left,
            std::atomic<int64_t>& missing) {
    if (missing.fetch_sub(1) > 1) return;
    const int64_t queries = item.rows * call.group, sums = item.heads * Sums::floats(queries, call.width);
    for (int64_t split = 1; split < shared.splits; split++)
        for (int64_t h = 0; h < item.heads; h++)
            for (int64_t i = 0; i < queries; i++)
                merge(tile.at(left, h), tile.at(left + split * sums, h), i, call.width);
    tile.write(left);
}

// Working memory of a thread, and what a tile sums up in: all splits, and one.
template <class E, class C>
struct Room {
    float *total, *part, *scratch;

    Room(const Call<E>& call, const Item& item) {
        static thread_local std::vector<float> memory;
        const int64_t queries = item.rows * call.group, sums = item.heads * Sums::floats(queries, call.width);
        total = take(memory, 2 * sums + Tile<E, C>::floats(call, queries, item.heads));
        part = total + sums, scratch = total + 2 * sums;
    }
};

template <class E, class C>
void compute(const Call<E>& call, const Item& item, const Work& work, float* left, std::atomic<int64_t>* missing) {
    const Room<E, C> room(call, item);
    Tile<E, C> tile(call, item, room.scratch);
    if (item.shared < 0) {
        tile.sum(room.total, room.part);
        tile.write(room.total);
        return;
    }
    const Shared& shared = work.shared[item.shared];
    float* first = left + shared.place;
    const int64_t sums = item.heads * tile.sums_size();
    tile.sum(first + (item.from - shared.first) * sums, room.total);
    finish(tile, call, item, shared, first, missing[item.shared]);
}

// Of a call that others have parts of.
struct Posting {
    Helpers& helpers;
    int64_t layer;
    const Part* parts;
    int64_t count;
    int64_t helped = 0;

    const Part* of(const Item& item) const {
        for (const Part* part = parts; part < parts + count; part++)
            if (part->span == item.span && part->first <= item.from && item.to <= part->end) return part;
        return nullptr;
    }
};

int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, 64) * 64; }

// Have others take splits that they have copies of. Those come last, in the order in which others do not take them.
template <class E>
void post(Posting& posting, const Call<E>& call, Work& work) {
    Area& area = posting.helpers.area(posting.helpers.number);
    char* base = reinterpret_cast<char*>(&area);
    const int64_t number = posting.helpers.calls++, dim = call.cache.dim, heads = call.batch.heads;
    area.layer = posting.layer, area.heads = heads, area.kv_heads = call.cache.kv_heads, area.scale = call.scale;
    const auto lent = std::stable_partition(work.items.begin(), work.items.end(), [&](const Item& item) {
        return item.shared < 0 || item.to > item.from + 1 || !posting.of(item);
    });
    int64_t posted = 0, at = AREA_DATA, spans = 0;
    std::vector<int64_t> place(call.batch.count, -1);  // of a span among those that are posted
    for (auto item = work.items.end(); item != lent && posted < MOST_POSTED;) {
        --item;
        const Part& part = *posting.of(*item);
        const Span& span = call.batch.spans[item->span];
        const int64_t queries = whole_lines(span.rows * heads * dim * sizeof(E)), before = part.first * SPLIT_BLOCKS;
        const int64_t ids = whole_lines(part.end * SPLIT_BLOCKS * sizeof(int64_t));
        const int64_t sums = whole_lines(item->heads * Sums::floats(item->rows * call.group, call.width) * sizeof(float));
        const bool is_new = place[item->span] < 0;
        if (item->row > 0 || item->rows < span.rows || part.end * SPLIT_BLOCKS * BLOCK_TOKENS > span.start) continue;
        if (at + sums + (is_new ? queries + ids : 0) > AREA_BYTES || (is_new && spans == MOST_SPANS)) continue;
        if (is_new) {
            for (int64_t row = 0; row < span.rows; row++)
                std::memcpy(base + at + row * heads * dim * sizeof(E), call.q + (span.row + row) * call.q_stride,
                            heads * dim * sizeof(E));
            auto* to = reinterpret_cast<int64_t*>(base + at + queries);
            std::fill(to, to + before, 0);
            std::copy(part.blocks, part.blocks + part.end * SPLIT_BLOCKS - before, to + before);
            area.spans[spans] = {span.rows, span.start, at, at + queries};
            place[item->span] = spans++;
            at += queries + ids;
        }
        PostedSplit& split = area.splits[posted++];
        split.span = place[item->span], split.head = item->head, split.heads = item->heads, split.split = item->from;
        split.sums = at;
        at += sums;
        item->posted = &split;
        split.state.store(state_of(number, part.helper, OPEN));
    }
    area.posted.store(posted);
    for (int64_t who = 0; who < posting.helpers.size; who++)
        if (who != posting.helpers.number) ring(posting.helpers.area(who).bell);
}

// Wait for the splits that others have taken, and add them up.
template <class E, class C>
int64_t collect(Posting& posting, const Call<E>& call, const Work& work, const std::vector<char>& own, float* left,
                std::atomic<int64_t>* missing) {
    Helpers& helpers = posting.helpers;
    Area& area = helpers.area(helpers.number);
    int64_t status = MET;
    for (size_t i = 0; i < work.items.size(); i++) {
        const Item& item = work.items[i];
        if (!item.posted || own[i]) continue;
        const uint64_t state = item.posted->state.load();
        if (phase_of(state) == OPEN && claim(*item.posted, state)) continue;  // the step is to end
        const int64_t who = helper_of(state) * helpers.stride + helpers.offset + 1;
        const auto done = [&] { return phase_of(item.posted->state.load()) == DONE; };
        if ((status = wait_until(*helpers.ranks, area.bell, static_cast<int32_t>(who), done)) != MET) break;
        posting.helped++;
        const Shared& shared = work.shared[item.shared];
        const int64_t sums = item.heads * Sums::floats(item.rows * call.group, call.width);
        float* first = left + shared.place;
        std::memcpy(first + (item.from - shared.first) * sums, reinterpret_cast<char*>(&area) + item.posted->sums,
                    sums * sizeof(float));
        const Room<E, C> room(call, item);
        Tile<E, C> tile(call, item, room.scratch);
        finish(tile, call, item, shared, first, missing[item.shared]);
    }
    area.posted.store(0);
    return status;
}

// The widths of a query and of sums, filled up to whole vectors.
int64_t whole_vectors(int64_t width) { return ceil_div(width, 16) * 16; }

template <class E, class C>
int64_t run(const AttentionBatch& batch, Cache cache, const void* q, int64_t q_stride, void* out, float scale,
            int64_t window, Posting* posting) {
    static thread_local Work kept;
    static thread_local std::vector<float> memory;
    const int64_t q_width = whole_vectors(cache.dim), width = whole_vectors(cache.value_dim);
    const bool latent = cache.kind == 0;
    if (latent) {  // each part of the heads as if it had K and V of its own
        cache.kv_heads = parts_of(batch, width);
        cache.head = cache.scale_head = 0;
    }
    const int64_t group = batch.heads / cache.kv_heads;
    plan(batch, cache.kv_heads, window, group, width, latent, kept);
    const Work& work = kept;
    float* left = take(memory, work.floats);
    std::unique_ptr<std::atomic<int64_t>[]> missing(new std::atomic<int64_t>[work.shared.size()]);
    for (size_t i = 0; i < work.shared.size(); i++) missing[i] = work.shared[i].splits;
    const Call<E> call{batch,  cache, static_cast<const E*>(q), q_stride, static_cast<E*>(out), scale * LOG2_E,
                       window, group, q_width, width};
    if (posting) post(*posting, call, kept);
    const int count = static_cast<int>(work.items.size());
    std::vector<char> own(posting ? count : 0);  // of what is posted, what this rank has taken back
    auto task = [&](int index) {
        const Item& item = work.items[index];
        if (item.posted) {
            const uint64_t state = item.posted->state.load();
            if (phase_of(state) != OPEN || !claim(*item.posted, state)) return;
            own[index] = 1;
        }
        compute<E, C>(call, item, work, left, missing.get());
    };
    if (work.cost < ALONE)
        for (int i = 0; i < count; i++) task(i);
    else
        parallel_for(count, task);
    return posting ? collect<E, C>(*posting, call, work, own, left, missing.get()) : MET;
}

template <class E, class C>
void help_with(const Area& area, const PostedSplit& split, Cache cache) {
    char* base = reinterpret_cast<char*>(const_cast<Area*>(&area));
    const PostedSpan& posted = area.spans[split.span];
    if (cache.kind == 0) cache.head = cache.scale_head = 0;
    cache.kv_heads = area.kv_heads;
    const Span span{0, posted.rows, posted.start, -1};
    const AttentionBatch batch{&span, 1, reinterpret_cast<const int64_t*>(base + posted.ids), area.heads};
    const Call<E> call{batch, cache, reinterpret_cast<const E*>(base + posted.q), area.heads * cache.dim, nullptr,
                       area.scale, 0, area.heads / area.kv_heads, whole_vectors(cache.dim), whole_vectors(cache.value_dim)};
    const Item item{0, 0, 0, posted.rows, split.head, split.heads, split.split, split.split + 1, 0, nullptr};
    const Room<E, C> room(call, item);
    Tile<E, C> tile(call, item, room.scratch);
    tile.sum(reinterpret_cast<float*>(base + split.sums), room.part);
}

}  // namespace

void attention(const AttentionBatch& batch, const Cache& cache, const void* q, int64_t q_stride, void* out, float scale,
               int64_t window) {
    const auto compute = cache.is_bf16 ? (cache.scales ? run<bf16, int8_t> : run<bf16, bf16>)
                                       : (cache.scales ? run<float, int8_t> : run<float, float>);
    compute(batch, cache, q, q_stride, out, scale, window, nullptr);
}

int64_t attention_with(Helpers& helpers, int64_t layer, const Part* parts, int64_t count, const AttentionBatch& batch,
                       const Cache& cache, const void* q, int64_t q_stride, void* out, float scale, int64_t* helped) {
    const auto compute = cache.is_bf16 ? (cache.scales ? run<bf16, int8_t> : run<bf16, bf16>)
                                       : (cache.scales ? run<float, int8_t> : run<float, float>);
    Posting posting{helpers, layer, parts, count};
    const int64_t status = compute(batch, cache, q, q_stride, out, scale, 0, &posting);
    *helped = posting.helped;
    return status;
}

void attend_for(const Area& area, const PostedSplit& split, const Cache& copies) {
    const auto help = copies.is_bf16 ? (copies.scales ? help_with<bf16, int8_t> : help_with<bf16, bf16>)
                                     : (copies.scales ? help_with<float, int8_t> : help_with<float, float>);
    help(area, split, copies);
}

}  // namespace penstock

extern "C" void penstock_attention(const penstock::Span* spans, int64_t count, const int64_t* ids,
                                   const penstock::Cache* cache, int64_t heads, const void* q, int64_t q_stride,
                                   void* out, float scale, int64_t window) {
    penstock::attention({spans, count, ids, heads}, *cache, q, q_stride, out, scale, window);
}
