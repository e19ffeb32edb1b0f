// Sixteen lanes of float32, and bfloat16 as it lies in memory.
//
// GCC's vector extensions: +, -, *, / and comparisons work lane by lane, and the compiler splits vectors that are wider
// than the machine's. The library is compiled with -ffp-contract=off, so a * b + c rounds twice and `fma` once,
// everywhere alike: the same arithmetic in two places gives the same bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

// For what must not leave the registers of its caller.
#define PENSTOCK_INLINE inline __attribute__((always_inline))

namespace penstock {

constexpr int LANES = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

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

inline f32x16 splat(float x) { return x - f32x16{}; }

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, sizeof x);
    std::memcpy(y, &b, sizeof y);
    std::memcpy(z, &c, sizeof z);
    for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
    std::memcpy(&c, z, sizeof z);
    return c;
#elif defined(__ARM_NEON) && defined(__aarch64__)
    float32x4_t x[4], y[4], z[4];
    std::memcpy(x, &a, sizeof x);
    std::memcpy(y, &b, sizeof y);
    std::memcpy(z, &c, sizeof z);
    for (int i = 0; i < 4; i++) z[i] = vfmaq_f32(z[i], x[i], y[i]);
    std::memcpy(&c, z, sizeof z);
    return c;
#else
    return a * b + c;
#endif
}

// As `narrow`; instructions for it also take what is below 2^-126 for zero.
inline u16x16 narrow(f32x16 x) {
#if defined(__AVX512BF16__)
    return reinterpret_cast<u16x16>(_mm512_cvtneps_pbh(x));
#else
    const u32x16 bits = reinterpret_cast<u32x16>(x);
    const u32x16 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    const u32x16 nan = reinterpret_cast<u32x16>((bits & 0x7fffffff) > 0x7f800000);
    return __builtin_convertvector((nan & (bits >> 16 | 64)) | (~nan & rounded), u16x16);
#endif
}
inline f32x16 widen(u16x16 x) {
#if defined(__AVX512F__)
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(x)), 16));
#else
    return reinterpret_cast<f32x16>(__builtin_convertvector(x, u32x16) << 16);
#endif
}

// Loads and stores need no alignment. `count` < 16 fills the rest with zeros, and leaves memory behind it alone.
inline f32x16 load(const float* from) {
    f32x16 x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline f32x16 load(const bf16* from) {
    u16x16 x;
    std::memcpy(&x, from, sizeof x);
    return widen(x);
}
template <class T>
inline f32x16 load(const T* from, int count) {
    T padded[LANES] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}

inline void store(float* to, f32x16 x) { std::memcpy(to, &x, sizeof x); }
inline void store(bf16* to, f32x16 x) {
    const u16x16 y = narrow(x);
    std::memcpy(to, &y, sizeof y);
}
template <class T>
inline void store(T* to, f32x16 x, int count) {
    T padded[LANES];
    store(padded, x);
    std::memcpy(to, padded, count * sizeof(T));
}

}  // namespace penstock
