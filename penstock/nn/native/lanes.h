// What rows and attention do with sixteen lanes beyond arithmetic: choices, what is across lanes in a fixed order, powers.
#pragma once

#include "vec.h"

namespace penstock {

constexpr float LOG2_E = 1.44269504088896341f;

// Lane by lane, `a` where `choice` is set and `b` elsewhere.
inline f32x16 where(i32x16 choice, f32x16 a, f32x16 b) { return choice ? a : b; }

// Where one is a NaN, the second.
inline f32x16 max(f32x16 a, f32x16 b) {
#ifdef __AVX512F__
    return _mm512_max_ps(a, b);
#else
    return where(a > b, a, b);
#endif
}

// Whether every lane is `most` at most, and none a NaN.
inline bool below(f32x16 x, float most) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask(x, splat(most), _CMP_LE_OQ) == 0xffff;
#else
    const i32x16 is = x <= splat(most);
    bool all = true;
    for (int i = 0; i < LANES; i++) all &= is[i] != 0;
    return all;
#endif
}

// Rounds to the nearest whole number, ties to even; of what is below 2^22.
inline i32x16 to_whole(f32x16 x) {
    return reinterpret_cast<i32x16>(x + splat(12582912.0f)) - 0x4b400000;  // the sum has no room for fractions
}

inline i32x16 lane_numbers() { return i32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

template <int DISTANCE>
inline f32x16 across(f32x16 x) {
    constexpr int D = DISTANCE;
    return __builtin_shufflevector(x, x, 0 ^ D, 1 ^ D, 2 ^ D, 3 ^ D, 4 ^ D, 5 ^ D, 6 ^ D, 7 ^ D, 8 ^ D, 9 ^ D, 10 ^ D,
                                   11 ^ D, 12 ^ D, 13 ^ D, 14 ^ D, 15 ^ D);
}

// In every lane, the largest of all.
inline f32x16 max_lanes(f32x16 x) {
    x = max(x, across<8>(x));
    x = max(x, across<4>(x));
    x = max(x, across<2>(x));
    return max(x, across<1>(x));
}

// The sum of all, halves first.
inline float sum_lanes(f32x16 x) {
    x = x + across<8>(x);
    x = x + across<4>(x);
    x = x + across<2>(x);
    x = x + across<1>(x);
    return x[0];
}

// 2^x for x <= 127, as a polynomial with 1 at 0 has it between whole numbers; 0 below 2^-126. A NaN stays one.
template <int DEGREE>
inline f32x16 exp2(f32x16 x, const float (&factors)[DEGREE]) {
    const f32x16 bounded = max(splat(-200.0f), x);
#ifdef __AVX512F__
    const f32x16 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const f32x16 whole = (bounded + splat(12582912.0f)) - splat(12582912.0f);  // the sum has no room for fractions
#endif
    const f32x16 rest = bounded - whole;  // in [-0.5, 0.5]
    f32x16 y = splat(factors[0]);
#pragma GCC unroll 8
    for (int i = 1; i < DEGREE; i++) y = fma(y, rest, splat(factors[i]));
    y = fma(y, rest, splat(1.0f));
#ifdef __AVX512F__
    return _mm512_scalef_ps(y, whole);
#else
    const i32x16 exponent = __builtin_convertvector(max(splat(-127.0f), whole), i32x16);  // 2^-127 becomes 0
    return y * reinterpret_cast<f32x16>((exponent + 127) << 23);
#endif
}

// Minimax of the relative error: within 1.2e-7 of 2^x, and within 1.1e-4.
inline f32x16 exp2(f32x16 x) {
    return exp2(x, {0x1.41fbbcp-13f, 0x1.5f3e52p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e430p-1f});
}
inline f32x16 rough_exp2(f32x16 x) { return exp2(x, {0x1.c2a218p-5f, 0x1.f00c4ep-3f, 0x1.62f5fap-1f}); }

}  // namespace penstock
