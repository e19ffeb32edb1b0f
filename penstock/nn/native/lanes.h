// What rows and attention do with sixteen lanes beyond arithmetic: choices, what is across lanes in a fixed order, powers.
#pragma once

#include "vec.h"

namespace penstock {

constexpr float LOG2_E = 1.44269504088896341f;

// Whether every lane is `most` at most, and none a NaN.
PENSTOCK_INLINE bool below(f32x16 x, float most) {
#ifdef __AVX512F__
    return _mm512_cmp_ps_mask(x, splat(most), _CMP_LE_OQ) == 0xffff;
#else
    return all(x <= splat(most));
#endif
}

// Rounds to the nearest whole number, ties to even; of what is below 2^22.
PENSTOCK_INLINE i32x16 to_whole(f32x16 x) {
    return as<i32x16>(x + splat(12582912.0f)) - 0x4b400000;  // the sum has no room for fractions
}

inline i32x16 lane_numbers() {
    constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return get<i32x16>(NUMBERS);
}

// In every lane, the largest of all.
PENSTOCK_INLINE f32x16 max_lanes(f32x16 x) {
    x = max(x, across<8>(x));
    x = max(x, across<4>(x));
    x = max(x, across<2>(x));
    return max(x, across<1>(x));
}

// The sum of all, halves first.
PENSTOCK_INLINE float sum_lanes(f32x16 x) {
    x = x + across<8>(x);
    x = x + across<4>(x);
    x = x + across<2>(x);
    x = x + across<1>(x);
    return x[0];
}

// 2^x for x <= 127, as a polynomial with 1 at 0 has it between whole numbers; 0 below 2^-126. A NaN stays one.
template <int DEGREE>
PENSTOCK_INLINE f32x16 exp2(f32x16 x, const float (&factors)[DEGREE]) {
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
    const i32x16 exponent = to_i32(max(splat(-127.0f), whole));  // 2^-127 becomes 0
    return y * as<f32x16>((exponent + 127) << 23);
#endif
}

// Minimax of the relative error: within 1.2e-7 of 2^x, and within 1.1e-4.
PENSTOCK_INLINE f32x16 exp2(f32x16 x) {
    return exp2(x, {0x1.41fbbcp-13f, 0x1.5f3e52p-10f, 0x1.3b2d4cp-7f, 0x1.c6aee8p-5f, 0x1.ebfbdcp-3f, 0x1.62e430p-1f});
}
PENSTOCK_INLINE f32x16 rough_exp2(f32x16 x) { return exp2(x, {0x1.c2a218p-5f, 0x1.f00c4ep-3f, 0x1.62f5fap-1f}); }

}  // namespace penstock
