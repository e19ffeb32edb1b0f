// K, V and weights as products read them: in units of 32 bits, which hold one float or two bfloat16 that follow one another in a sum.
#pragma once

#include "vec.h"

namespace penstock {

// Up to 16 units, the others 0.
inline f32x16 load_units(const void* from, int64_t count) {
    if (count >= 16) return load(static_cast<const float*>(from));
#ifdef __AVX512F__
    return reinterpret_cast<f32x16>(_mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << count) - 1), from));
#else
    return load(static_cast<const float*>(from), static_cast<int>(count));
#endif
}


#ifdef __AVX512F__

// Rows become columns.
PENSTOCK_INLINE void transpose(f32x16 (&a)[16]) {
    f32x16 b[16];
#pragma GCC unroll 8
    for (int r = 0; r < 16; r += 2) {
        b[r] = __builtin_shufflevector(a[r], a[r + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        b[r + 1] = __builtin_shufflevector(a[r], a[r + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        const int r = i / 4 * 4 + i % 4 / 2;  // of each four rows, the first two pairs up with the last two
        a[i] = __builtin_shufflevector(b[r], b[r + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        a[i + 1] = __builtin_shufflevector(b[r], b[r + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    // a[4 i + j] holds columns j, j + 4, j + 8 and j + 12 of rows 4 i to 4 i + 3
    auto even = [](f32x16 x, f32x16 y) {
        return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    };
    auto odd = [](f32x16 x, f32x16 y) {
        return __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const f32x16 x = even(a[j], a[4 + j]), y = even(a[8 + j], a[12 + j]);
        const f32x16 z = odd(a[j], a[4 + j]), w = odd(a[8 + j], a[12 + j]);
        b[j] = even(x, y), b[8 + j] = odd(x, y);
        b[4 + j] = even(z, w), b[12 + j] = odd(z, w);
    }
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++) a[c] = b[c];
}

// Whole numbers of 8 bits, as they lie in memory, become pairs of 16 bits: 32 of them, or `count` < 32 and zeros.
PENSTOCK_INLINE i16x32 widen32(const int8_t* from, int64_t count = 32) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    const __m256i x = count >= 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))
                                  : _mm256_maskz_loadu_epi8((1u << count) - 1, from);
    return reinterpret_cast<i16x32>(_mm512_cvtepi8_epi16(x));
#else
    typedef int8_t i8x32 __attribute__((vector_size(32)));
    i8x32 x{};
    std::memcpy(&x, from, count >= 32 ? 32 : count);
    return __builtin_convertvector(x, i16x32);
#endif
}

// (first[i], second[i]) for i < 16.
inline f32x16 pairs(i16x32 first, i16x32 second) {
    return reinterpret_cast<f32x16>(__builtin_shufflevector(
        first, second, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13,
        45, 14, 46, 15, 47));
}

// 32 numbers of a row, or `count` < 32 and zeros, as they are or widened.
PENSTOCK_INLINE i16x32 load32(const bf16* from, int64_t count = 32) {
    if (count >= 32) return get<i16x32>(from);
    return reinterpret_cast<i16x32>(_mm512_maskz_loadu_epi16((1u << count) - 1, from));
}
PENSTOCK_INLINE i16x32 load32(const int8_t* from, int64_t count = 32) { return widen32(from, count); }

// (first[i], second[i]) for i < count in N vectors, 0 beyond; a row that is null is 0. Of each two vectors the first gets,
// of every eight, the first four: that is what instructions do, and `in_order` undoes it.
template <int N, class E>
PENSTOCK_INLINE void interleave(const E* first, const E* second, int64_t count, f32x16 (&to)[N]) {
    auto row = [&](const E* from, int64_t at) {
        return from == nullptr || at >= count ? i16x32{} : load32(from + at, count - at);
    };
    for (int n = 0; n < N; n += 2) {
        const i16x32 x = row(first, 16 * n), y = row(second, 16 * n);
        if (n + 1 == N) {
            to[n] = pairs(x, y);
            break;
        }
        to[n] = reinterpret_cast<f32x16>(__builtin_shufflevector(
            x, y, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25,
            57, 26, 58, 27, 59));
        to[n + 1] = reinterpret_cast<f32x16>(__builtin_shufflevector(
            x, y, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20, 52, 21, 53, 22, 54, 23, 55, 28, 60, 29,
            61, 30, 62, 31, 63));
    }
}

template <int N>
PENSTOCK_INLINE void in_order(f32x16 (&a)[N]) {
    for (int n = 0; n + 1 < N; n += 2) {
        const f32x16 x = a[n], y = a[n + 1];
        a[n] = __builtin_shufflevector(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
        a[n + 1] = __builtin_shufflevector(x, y, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    }
}

// In every lane group of four, the sums of four vectors' lanes there.
PENSTOCK_INLINE i32x16 sum_fours(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    auto fold = [](i32x16 x, i32x16 y) {
        return __builtin_shufflevector(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
               __builtin_shufflevector(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    };
    const i32x16 x = fold(a, b), y = fold(c, d);
    return __builtin_shufflevector(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           __builtin_shufflevector(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// Of four such, each group's sum over a vector's groups: what 16 vectors' lanes come to, in the order of the vectors.
PENSTOCK_INLINE i32x16 sum_groups(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    auto fold = [](i32x16 x, i32x16 y) {
        return __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               __builtin_shufflevector(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    };
    const i32x16 x = fold(a, b), y = fold(c, d);
    return __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

#else

// 16 rows of 16 units, `stride` bytes apart, become columns.
PENSTOCK_INLINE void transpose(const void* rows, int64_t stride, f32x16 (&a)[16]) {
    constexpr int WIDTH = sizeof(f32xR) / sizeof(float);
    alignas(64) float columns[16][LANES];
#pragma GCC unroll 4
    for (int r = 0; r < 16; r += WIDTH)
#pragma GCC unroll 4
        for (int c = 0; c < 16; c += WIDTH) {
            f32xR square[WIDTH];
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; i++) square[i] = get<f32xR>(static_cast<const char*>(rows) + (r + i) * stride + 4 * c);
            transpose(square);
#pragma GCC unroll 8
            for (int i = 0; i < WIDTH; i++) put(&columns[c + i][r], square[i]);
        }
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++) a[c] = load(columns[c]);
}
PENSTOCK_INLINE void transpose(f32x16 (&a)[16]) {
    alignas(64) float rows[16][LANES];
#pragma GCC unroll 16
    for (int r = 0; r < 16; r++) store(rows[r], a[r]);
    transpose(rows, sizeof rows[0], a);
}

// Whole numbers of 8 bits, as they lie in memory, become pairs of 16 bits: 32 of them, or `count` < 32 and zeros.
PENSTOCK_INLINE i16x32 widen32(const int8_t* from, int64_t count = 32) {
    int8_t padded[32];
    if (count < 32) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, from, count);
        from = padded;
    }
    return two(widen_i8(from), widen_i8(from + 16));
}

// (first[i], second[i]) for i < count in N vectors, 0 beyond; a row that is null is 0. Bfloat16 stay as they are.
template <int N, class E>
PENSTOCK_INLINE void interleave(const E* first, const E* second, int64_t count, f32x16 (&to)[N]) {
    using Row = decltype(widen_i8(nullptr));
    const auto row = [&](const E* from, int64_t at) -> Row {
        const int64_t left = from == nullptr ? 0 : count - at;
        if (left <= 0) return Row{};
        E padded[16] = {};
        if (left < 16) std::memcpy(padded, from + at, left * sizeof(E));
        const E* there = left < 16 ? padded : from + at;
        if constexpr (sizeof(E) == 1)
            return widen_i8(there);
        else
            return get<Row>(there);
    };
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) to[n] = as<f32x16>(zip(row(first, 16 * n), row(second, 16 * n)));
}

template <int N>
PENSTOCK_INLINE void in_order(f32x16 (&)[N]) {}

// In every lane group of four, the sums of four vectors' lanes there.
PENSTOCK_INLINE i32xR sum_fours(i32xR a, i32xR b, i32xR c, i32xR d) {
#if defined(__AVX2__)
    const __m256i x = _mm256_hadd_epi32((__m256i)a, (__m256i)b), y = _mm256_hadd_epi32((__m256i)c, (__m256i)d);
    return (i32xR)_mm256_hadd_epi32(x, y);
#else
    const int32x4_t x = vpaddq_s32((int32x4_t)a, (int32x4_t)b), y = vpaddq_s32((int32x4_t)c, (int32x4_t)d);
    return (i32xR)vpaddq_s32(x, y);
#endif
}
template <class V>
PENSTOCK_INLINE Two<V> sum_fours(Two<V> a, Two<V> b, Two<V> c, Two<V> d) {
    return {sum_fours(a.lo, b.lo, c.lo, d.lo), sum_fours(a.hi, b.hi, c.hi, d.hi)};
}

// Of four such, each group's sum over a vector's groups: what 16 vectors' lanes come to, in the order of the vectors.
PENSTOCK_INLINE i32x16 sum_groups(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
    const auto x = a.lo + a.hi, y = b.lo + b.hi, z = c.lo + c.hi, w = d.lo + d.hi;
#if defined(__AVX2__)
    const auto fold = [](i32xR x, i32xR y) {
        return (i32xR)_mm256_permute2x128_si256((__m256i)x, (__m256i)y, 0x20) +
               (i32xR)_mm256_permute2x128_si256((__m256i)x, (__m256i)y, 0x31);
    };
    return two(fold(x, y), fold(z, w));
#else
    return two(two(x.lo + x.hi, y.lo + y.hi), two(z.lo + z.hi, w.lo + w.hi));
#endif
}

#endif

}  // namespace penstock
