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

// 2^x for x <= 127, within 1.2e-7 of it; 0 below 2^-126. A NaN stays one.
inline f32x16 exp2(f32x16 x) {
    const f32x16 bounded = max(splat(-200.0f), x);
#ifdef __AVX512F__
    const f32x16 whole = _mm512_roundscale_ps(bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const f32x16 whole = (bounded + splat(12582912.0f)) - splat(12582912.0f);  // the sum has no room for fractions
#endif
    const f32x16 rest = bounded - whole;  // in [-0.5, 0.5]
    f32x16 y = splat(0x1.41fbbcp-13f);    // minimax of the relative error, and 1 at 0
    y = fma(y, rest, splat(0x1.5f3e52p-10f));
    y = fma(y, rest, splat(0x1.3b2d4cp-7f));
    y = fma(y, rest, splat(0x1.c6aee8p-5f));
    y = fma(y, rest, splat(0x1.ebfbdcp-3f));
    y = fma(y, rest, splat(0x1.62e430p-1f));
    y = fma(y, rest, splat(1.0f));
#ifdef __AVX512F__
    return _mm512_scalef_ps(y, whole);
#else
    const i32x16 exponent = __builtin_convertvector(max(splat(-127.0f), whole), i32x16);  // 2^-127 becomes 0
    return y * reinterpret_cast<f32x16>((exponent + 127) << 23);
#endif
}

}  // namespace penstock
