// Sixteen lanes where registers have fewer: two halves, each of them a register or two halves again.
//
// GCC keeps vectors that are wider than a register in memory, and copies them there with every operation. Of halves it
// keeps each in a register.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "kernels need AVX2 or NEON"
#endif

namespace penstock {

template <class V>
struct Two {
    V lo, hi;

    PENSTOCK_INLINE auto operator[](int i) const {
        constexpr int HALF = sizeof(V) / sizeof(V{}[0]);
        return i < HALF ? lo[i] : hi[i - HALF];
    }
};

template <class V>
PENSTOCK_INLINE Two<V> two(V lo, V hi) {
    return {lo, hi};
}

template <class V>
struct IsTwo : std::false_type {};
template <class V>
struct IsTwo<Two<V>> : std::true_type {};

// The same bits as lanes of another type.
template <class To, class From>
PENSTOCK_INLINE To as(From x) {
    if constexpr (IsTwo<To>::value)
        return {as<decltype(To::lo)>(x.lo), as<decltype(To::lo)>(x.hi)};
    else
        return reinterpret_cast<To>(x);
}

// What lies in memory, which needs no alignment.
template <class V>
PENSTOCK_INLINE V get(const void* from) {
    if constexpr (IsTwo<V>::value) {
        using Half = decltype(V::lo);
        return {get<Half>(from), get<Half>(static_cast<const char*>(from) + sizeof(Half))};
    } else {
        V x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
}
template <class V>
PENSTOCK_INLINE void put(void* to, V x) {
    if constexpr (IsTwo<V>::value) {
        put(to, x.lo);
        put(static_cast<char*>(to) + sizeof x.lo, x.hi);
    } else {
        std::memcpy(to, &x, sizeof x);
    }
}

// Lane by lane.
#define PENSTOCK_EACH(OP)                                                    \
    template <class V>                                                       \
    PENSTOCK_INLINE auto operator OP(Two<V> a, Two<V> b) {                   \
        return two(a.lo OP b.lo, a.hi OP b.hi);                              \
    }                                                                        \
    template <class V, class S, class = std::enable_if_t<std::is_arithmetic_v<S>>> \
    PENSTOCK_INLINE auto operator OP(Two<V> a, S b) {                        \
        return two(a.lo OP b, a.hi OP b);                                    \
    }
PENSTOCK_EACH(+)
PENSTOCK_EACH(-)
PENSTOCK_EACH(*)
PENSTOCK_EACH(/)
PENSTOCK_EACH(&)
PENSTOCK_EACH(|)
PENSTOCK_EACH(^)
PENSTOCK_EACH(<<)
PENSTOCK_EACH(>>)
PENSTOCK_EACH(<)
PENSTOCK_EACH(<=)
PENSTOCK_EACH(>)
PENSTOCK_EACH(>=)
PENSTOCK_EACH(==)
#undef PENSTOCK_EACH

#define PENSTOCK_EACH(OP)                                   \
    template <class V, class X>                             \
    PENSTOCK_INLINE Two<V>& operator OP##=(Two<V>& a, X b) { \
        return a = a OP b;                                  \
    }
PENSTOCK_EACH(+)
PENSTOCK_EACH(-)
PENSTOCK_EACH(*)
PENSTOCK_EACH(&)
PENSTOCK_EACH(|)
PENSTOCK_EACH(^)
#undef PENSTOCK_EACH

template <class V>
PENSTOCK_INLINE Two<V> operator-(Two<V> x) {
    return {-x.lo, -x.hi};
}
template <class V>
PENSTOCK_INLINE Two<V> operator~(Two<V> x) {
    return {~x.lo, ~x.hi};
}

// --- a register

#if defined(__AVX2__)

typedef float f32xR __attribute__((vector_size(32)));
typedef int32_t i32xR __attribute__((vector_size(32)));
typedef uint32_t u32xR __attribute__((vector_size(32)));
typedef int16_t i16xR __attribute__((vector_size(32)));
typedef Two<f32xR> f32x16;
typedef Two<i32xR> i32x16;
typedef Two<u32xR> u32x16;
typedef Two<i16xR> i16x32;
typedef uint16_t u16x16 __attribute__((vector_size(32)));

PENSTOCK_INLINE f32x16 splat(float x) { return two<f32xR>(_mm256_set1_ps(x), _mm256_set1_ps(x)); }
PENSTOCK_INLINE i32x16 splat_i32(int32_t x) { return two<i32xR>((i32xR)_mm256_set1_epi32(x), (i32xR)_mm256_set1_epi32(x)); }
PENSTOCK_INLINE f32xR fma(f32xR a, f32xR b, f32xR c) { return _mm256_fmadd_ps(a, b, c); }
PENSTOCK_INLINE f32xR max(f32xR a, f32xR b) { return _mm256_max_ps(a, b); }
PENSTOCK_INLINE bool all(i32xR choice) { return _mm256_movemask_ps((__m256)choice) == 0xff; }
PENSTOCK_INLINE unsigned bits_of(i32x16 choice) {
    return _mm256_movemask_ps((__m256)choice.lo) | _mm256_movemask_ps((__m256)choice.hi) << 8;
}

PENSTOCK_INLINE u32x16 widen_u16(u16x16 x) {
    const __m256i both = (__m256i)x;
    return two((u32xR)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(both)),
               (u32xR)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(both, 1)));
}
PENSTOCK_INLINE u16x16 low_u16(u32x16 x) {  // of what is below 2^16
    const __m256i packed = _mm256_packus_epi32((__m256i)x.lo, (__m256i)x.hi);  // in quarters 0 2 1 3
    return (u16x16)_mm256_permute4x64_epi64(packed, 0xd8);
}
PENSTOCK_INLINE __m256i low_i16(i32x16 x) {
    return _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)x.lo, (__m256i)x.hi), 0xd8);
}
// Whole numbers that 16, or 8, bits have room for.
PENSTOCK_INLINE void store_i16(int16_t* to, i32x16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), low_i16(x)); }
PENSTOCK_INLINE void store_i8(int8_t* to, i32x16 x) {
    const __m256i y = low_i16(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
PENSTOCK_INLINE i16xR widen_i8(const int8_t* from) {
    return (i16xR)_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
// Of pairs, the sum of the products of both.
PENSTOCK_INLINE i32xR dot_i16(i32xR sum, i16xR a, i16xR b) {
    return sum + (i32xR)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}

template <int D>
PENSTOCK_INLINE f32xR across(f32xR x) {
    return __builtin_shufflevector(x, x, 0 ^ D, 1 ^ D, 2 ^ D, 3 ^ D, 4 ^ D, 5 ^ D, 6 ^ D, 7 ^ D);
}

// Rows become columns.
PENSTOCK_INLINE void transpose(f32xR (&a)[8]) {
    f32xR b[8];
#pragma GCC unroll 4
    for (int r = 0; r < 8; r += 2) {
        b[r] = _mm256_unpacklo_ps(a[r], a[r + 1]);
        b[r + 1] = _mm256_unpackhi_ps(a[r], a[r + 1]);
    }
    const auto low = [](f32xR x, f32xR y) -> f32xR { return (f32xR)_mm256_unpacklo_pd((__m256d)x, (__m256d)y); };
    const auto high = [](f32xR x, f32xR y) -> f32xR { return (f32xR)_mm256_unpackhi_pd((__m256d)x, (__m256d)y); };
#pragma GCC unroll 2
    for (int r = 0; r < 8; r += 4) {
        a[r] = low(b[r], b[r + 2]), a[r + 1] = high(b[r], b[r + 2]);
        a[r + 2] = low(b[r + 1], b[r + 3]), a[r + 3] = high(b[r + 1], b[r + 3]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        const f32xR x = a[c], y = a[c + 4];
        a[c] = _mm256_permute2f128_ps(x, y, 0x20), a[c + 4] = _mm256_permute2f128_ps(x, y, 0x31);
    }
}

// (first[i], second[i]) for i < 16.
PENSTOCK_INLINE Two<i16xR> zip(i16xR first, i16xR second) {
    const __m256i x = _mm256_unpacklo_epi16((__m256i)first, (__m256i)second);  // of each half of 8 the first four
    const __m256i y = _mm256_unpackhi_epi16((__m256i)first, (__m256i)second);
    return two((i16xR)_mm256_permute2x128_si256(x, y, 0x20), (i16xR)_mm256_permute2x128_si256(x, y, 0x31));
}

#else

typedef float f32xR __attribute__((vector_size(16)));
typedef int32_t i32xR __attribute__((vector_size(16)));
typedef uint32_t u32xR __attribute__((vector_size(16)));
typedef int16_t i16xR __attribute__((vector_size(16)));
typedef uint16_t u16xR __attribute__((vector_size(16)));
typedef Two<Two<f32xR>> f32x16;
typedef Two<Two<i32xR>> i32x16;
typedef Two<Two<u32xR>> u32x16;
typedef Two<Two<i16xR>> i16x32;
typedef Two<u16xR> u16x16;

PENSTOCK_INLINE f32x16 splat(float x) {
    const Two<f32xR> half = two<f32xR>((f32xR)vdupq_n_f32(x), (f32xR)vdupq_n_f32(x));
    return two(half, half);
}
PENSTOCK_INLINE i32x16 splat_i32(int32_t x) {
    const Two<i32xR> half = two<i32xR>((i32xR)vdupq_n_s32(x), (i32xR)vdupq_n_s32(x));
    return two(half, half);
}
PENSTOCK_INLINE f32xR fma(f32xR a, f32xR b, f32xR c) { return (f32xR)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
PENSTOCK_INLINE f32xR max(f32xR a, f32xR b) { return a > b ? a : b; }
PENSTOCK_INLINE bool all(i32xR choice) { return vminvq_u32((uint32x4_t)choice) != 0; }
PENSTOCK_INLINE unsigned bits_of(i32xR choice) { return vaddvq_u32((uint32x4_t)(choice & i32xR{1, 2, 4, 8})); }
PENSTOCK_INLINE unsigned bits_of(i32x16 choice) {
    return bits_of(choice.lo.lo) | bits_of(choice.lo.hi) << 4 | bits_of(choice.hi.lo) << 8 | bits_of(choice.hi.hi) << 12;
}

PENSTOCK_INLINE Two<u32xR> widen_u16(u16xR x) {
    return two((u32xR)vmovl_u16(vget_low_u16((uint16x8_t)x)), (u32xR)vmovl_high_u16((uint16x8_t)x));
}
PENSTOCK_INLINE u32x16 widen_u16(u16x16 x) { return {widen_u16(x.lo), widen_u16(x.hi)}; }
PENSTOCK_INLINE u16xR low_u16(Two<u32xR> x) {
    return (u16xR)vmovn_high_u32(vmovn_u32((uint32x4_t)x.lo), (uint32x4_t)x.hi);
}
PENSTOCK_INLINE u16x16 low_u16(u32x16 x) { return {low_u16(x.lo), low_u16(x.hi)}; }
// Whole numbers that 16, or 8, bits have room for.
PENSTOCK_INLINE void store_i16(int16_t* to, i32x16 x) {
    const u16x16 y = low_u16(as<u32x16>(x));
    vst1q_u16(reinterpret_cast<uint16_t*>(to), (uint16x8_t)y.lo);
    vst1q_u16(reinterpret_cast<uint16_t*>(to) + 8, (uint16x8_t)y.hi);
}
PENSTOCK_INLINE void store_i8(int8_t* to, i32x16 x) {
    const u16x16 y = low_u16(as<u32x16>(x));
    vst1q_s8(to, (int8x16_t)vmovn_high_u16(vmovn_u16((uint16x8_t)y.lo), (uint16x8_t)y.hi));
}
PENSTOCK_INLINE Two<i16xR> widen_i8(const int8_t* from) {
    const int8x16_t x = vld1q_s8(from);
    return two((i16xR)vmovl_s8(vget_low_s8(x)), (i16xR)vmovl_high_s8(x));
}
// Of pairs, the sum of the products of both.
PENSTOCK_INLINE i32xR dot_i16(i32xR sum, i16xR a, i16xR b) {
    const int32x4_t low = vmull_s16(vget_low_s16((int16x8_t)a), vget_low_s16((int16x8_t)b));
    return sum + (i32xR)vpaddq_s32(low, vmull_high_s16((int16x8_t)a, (int16x8_t)b));
}

template <int D>
PENSTOCK_INLINE f32xR across(f32xR x) {
    return __builtin_shufflevector(x, x, 0 ^ D, 1 ^ D, 2 ^ D, 3 ^ D);
}

// Rows become columns.
PENSTOCK_INLINE void transpose(f32xR (&a)[4]) {
    const float32x4x2_t x = vtrnq_f32((float32x4_t)a[0], (float32x4_t)a[1]);
    const float32x4x2_t y = vtrnq_f32((float32x4_t)a[2], (float32x4_t)a[3]);
    const auto low = [](float32x4_t x, float32x4_t y) { return (f32xR)vcombine_f32(vget_low_f32(x), vget_low_f32(y)); };
    const auto high = [](float32x4_t x, float32x4_t y) { return (f32xR)vcombine_f32(vget_high_f32(x), vget_high_f32(y)); };
    a[0] = low(x.val[0], y.val[0]), a[1] = low(x.val[1], y.val[1]);
    a[2] = high(x.val[0], y.val[0]), a[3] = high(x.val[1], y.val[1]);
}

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Of pairs of bfloat16, the sum of the products of both.
PENSTOCK_INLINE f32xR dot_bf16(f32xR sum, f32xR a, f32xR b) {
    return (f32xR)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
template <class V>
PENSTOCK_INLINE Two<V> dot_bf16(Two<V> sum, Two<V> a, Two<V> b) {
    return {dot_bf16(sum.lo, a.lo, b.lo), dot_bf16(sum.hi, a.hi, b.hi)};
}
#endif

// (first[i], second[i]) for i < 8.
PENSTOCK_INLINE Two<i16xR> zip(i16xR first, i16xR second) {
    return two((i16xR)vzip1q_s16((int16x8_t)first, (int16x8_t)second), (i16xR)vzip2q_s16((int16x8_t)first, (int16x8_t)second));
}
PENSTOCK_INLINE Two<Two<i16xR>> zip(Two<i16xR> first, Two<i16xR> second) {
    return {zip(first.lo, second.lo), zip(first.hi, second.hi)};
}

#endif

// --- the same of halves

PENSTOCK_INLINE f32xR where(i32xR choice, f32xR a, f32xR b) { return choice ? a : b; }
PENSTOCK_INLINE f32xR to_f32(i32xR x) { return __builtin_convertvector(x, f32xR); }
PENSTOCK_INLINE f32xR to_f32(u32xR x) { return __builtin_convertvector(x, f32xR); }
PENSTOCK_INLINE i32xR to_i32(f32xR x) { return __builtin_convertvector(x, i32xR); }

template <class V>
PENSTOCK_INLINE Two<V> fma(Two<V> a, Two<V> b, Two<V> c) {
    return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)};
}
template <class V>
PENSTOCK_INLINE Two<V> max(Two<V> a, Two<V> b) {
    return {max(a.lo, b.lo), max(a.hi, b.hi)};
}
template <class C, class V>
PENSTOCK_INLINE Two<V> where(Two<C> choice, Two<V> a, Two<V> b) {
    return {where(choice.lo, a.lo, b.lo), where(choice.hi, a.hi, b.hi)};
}
template <class V>
PENSTOCK_INLINE bool all(Two<V> choice) {
    return all(choice.lo) && all(choice.hi);
}
template <class V>
PENSTOCK_INLINE auto to_f32(Two<V> x) {
    return two(to_f32(x.lo), to_f32(x.hi));
}
template <class V>
PENSTOCK_INLINE auto to_i32(Two<V> x) {
    return two(to_i32(x.lo), to_i32(x.hi));
}
template <class I, class V>
PENSTOCK_INLINE Two<I> dot_i16(Two<I> sum, Two<V> a, Two<V> b) {
    return {dot_i16(sum.lo, a.lo, b.lo), dot_i16(sum.hi, a.hi, b.hi)};
}
template <int D, class V>
PENSTOCK_INLINE Two<V> across(Two<V> x) {
    if constexpr (D * sizeof(float) == sizeof(V))
        return {x.hi, x.lo};
    else
        return {across<D>(x.lo), across<D>(x.hi)};
}

}  // namespace penstock
