// Sixteen lanes of float32, and bfloat16 as it lies in memory.
//
// A vector of the machine's where that has sixteen lanes, and halves elsewhere (halves.h): +, -, *, / and comparisons work
// lane by lane. The library is compiled with -ffp-contract=off, so a * b + c rounds twice and `fma` once, everywhere
// alike: the same arithmetic in two places gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// For what must not leave the registers of its caller.
#define PENSTOCK_INLINE inline __attribute__((always_inline))

#if !defined(__AVX512F__)
#include "halves.h"
#endif

namespace penstock {

constexpr int LANES = 16;

#if defined(__AVX512F__)

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int16_t i16x32 __attribute__((vector_size(64)));

template <class To, class From>
PENSTOCK_INLINE To as(From x) {
    return reinterpret_cast<To>(x);
}
template <class V>
PENSTOCK_INLINE V get(const void* from) {
    V x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
template <class V>
PENSTOCK_INLINE void put(void* to, V x) {
    std::memcpy(to, &x, sizeof x);
}
inline f32x16 splat(float x) { return x - f32x16{}; }
inline i32x16 splat_i32(int32_t x) { return x - i32x16{}; }
inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
// Where one is a NaN, the second.
inline f32x16 max(f32x16 a, f32x16 b) { return _mm512_max_ps(a, b); }
// Lane by lane, `a` where `choice` is set and `b` elsewhere.
inline f32x16 where(i32x16 choice, f32x16 a, f32x16 b) { return choice ? a : b; }
inline unsigned bits_of(i32x16 choice) { return _mm512_movepi32_mask(reinterpret_cast<__m512i>(choice)); }
inline bool all(i32x16 choice) { return bits_of(choice) == 0xffff; }
inline f32x16 to_f32(i32x16 x) { return __builtin_convertvector(x, f32x16); }
inline f32x16 to_f32(u32x16 x) { return __builtin_convertvector(x, f32x16); }
inline i32x16 to_i32(f32x16 x) { return __builtin_convertvector(x, i32x16); }
inline void store_i16(int16_t* to, i32x16 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(x)));
}
inline void store_i8(int8_t* to, i32x16 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(x)));
}
// Of pairs, the sum of the products of both.
inline i32x16 dot_i16(i32x16 sum, i16x32 a, i16x32 b) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<i32x16>(_mm512_dpwssd_epi32(
        reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#else
    return sum + reinterpret_cast<i32x16>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#endif
}
template <int DISTANCE>
inline f32x16 across(f32x16 x) {
    constexpr int D = DISTANCE;
    return __builtin_shufflevector(x, x, 0 ^ D, 1 ^ D, 2 ^ D, 3 ^ D, 4 ^ D, 5 ^ D, 6 ^ D, 7 ^ D, 8 ^ D, 9 ^ D, 10 ^ D,
                                   11 ^ D, 12 ^ D, 13 ^ D, 14 ^ D, 15 ^ D);
}

#endif

struct bf16 {
    uint16_t bits;
};

inline float widen(bf16 x) {
    const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}
inline float widen(float x) { return x; }

// Rounds to the nearest, ties to even; NaNs stay NaNs.
inline bf16 narrow(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(bits >> 16 | 64)};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// As `narrow`; instructions for it also take what is below 2^-126 for zero.
PENSTOCK_INLINE u16x16 narrow(f32x16 x) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<u16x16>(_mm512_cvtneps_pbh(x));
#else
    const u32x16 bits = as<u32x16>(x);
    const u32x16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const u32x16 nan = as<u32x16>((bits & 0x7fffffff) > 0x7f800000);
    const u32x16 found = (nan & (bits >> 16 | 64)) | (~nan & rounded);
#if defined(__AVX512F__)
    return __builtin_convertvector(found, u16x16);
#else
    return low_u16(found);
#endif
#endif
}
PENSTOCK_INLINE f32x16 widen(u16x16 x) {
#if defined(__AVX512F__)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)), 16));
#else
    return as<f32x16>(widen_u16(x) << 16);
#endif
}

// Of a word of two bfloat16 in each lane, the first and the second.
PENSTOCK_INLINE f32x16 first_of_two(f32x16 words) { return as<f32x16>(as<u32x16>(words) << 16); }
PENSTOCK_INLINE f32x16 second_of_two(f32x16 words) { return as<f32x16>(as<u32x16>(words) & 0xffff0000); }

// Loads and stores need no alignment. `count` < 16 fills the rest with zeros, and leaves memory behind it alone.
PENSTOCK_INLINE f32x16 load(const float* from) { return get<f32x16>(from); }
PENSTOCK_INLINE f32x16 load(const bf16* from) { return widen(get<u16x16>(from)); }
template <class T>
inline f32x16 load(const T* from, int count) {
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

PENSTOCK_INLINE void store(float* to, f32x16 x) { put(to, x); }
PENSTOCK_INLINE void store(bf16* to, f32x16 x) { put(to, narrow(x)); }
template <class T>
inline void store(T* to, f32x16 x, int count) {
    T padded[LANES];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

}  // namespace penstock
