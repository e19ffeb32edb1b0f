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


// Rows become columns.
PENSTOCK_INLINE void transpose(f32x16 (&a)[16]) {
#ifndef __AVX512F__
    float rows[16][LANES], columns[16][LANES];
    for (int r = 0; r < 16; r++) store(rows[r], a[r]);
    for (int c = 0; c < LANES; c++)
        for (int r = 0; r < 16; r++) columns[c][r] = rows[r][c];
    for (int c = 0; c < 16; c++) a[c] = load(columns[c]);
#else
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
#endif
}

#ifdef __AVX512BF16__
// (first[i], second[i]) for i < count in N vectors, 0 beyond; a row that is null is 0.
template <int N>
PENSTOCK_INLINE void interleave(const bf16* first, const bf16* second, int64_t count, f32x16 (&to)[N]) {
    typedef uint16_t u16x32 __attribute__((vector_size(64)));
    auto row = [&](const bf16* from, int64_t at) {
        if (from == nullptr || at >= count) return u16x32{};
        if (at + 32 <= count) return reinterpret_cast<u16x32>(_mm512_loadu_si512(from + at));
        return reinterpret_cast<u16x32>(_mm512_maskz_loadu_epi16((1u << (count - at)) - 1, from + at));
    };
    for (int n = 0; n < N; n += 2) {
        const u16x32 x = row(first, 16 * n), y = row(second, 16 * n);
        to[n] = reinterpret_cast<f32x16>(__builtin_shufflevector(
            x, y, 0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45,
            14, 46, 15, 47));
        if (n + 1 < N)
            to[n + 1] = reinterpret_cast<f32x16>(__builtin_shufflevector(
                x, y, 16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59,
                28, 60, 29, 61, 30, 62, 31, 63));
    }
}
#endif

}  // namespace penstock
