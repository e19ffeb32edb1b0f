// What is done to each row by itself. A row's result is the same to the bit whatever else is in the batch. Matrices are
// of bfloat16 or float32, as `is_bf16` says; strides are of rows, in elements; within a row elements lie together.
#pragma once

#include <cstdint>

#include "attention.h"

namespace penstock {

// Weights of a norm, [width] of the rows' type, or of float32 where `wide`; null where there is none.
struct Norm {
    const void* weight;
    int64_t wide;
};

// out = x / sqrt(mean(x^2) + eps) * weight, rounded before the weight, unless it is wide, and after it; `out` may be `x`.
void rms_norm(bool is_bf16, const void* x, int64_t x_stride, Norm norm, float eps, void* out, int64_t out_stride,
              int64_t rows, int64_t width);

// residual += x, rounded, and out = its norm. All contiguous; `out` may be `x`, and `sum` may be `residual`.
void add_rms_norm(bool is_bf16, const void* x, const void* residual, Norm norm, float eps, void* out, void* sum,
                  int64_t rows, int64_t width);

// x *= factor, rounded.
void scale(bool is_bf16, void* x, float factor, int64_t rows, int64_t width);

// By which [rows, turned / 2] cos and sin the first `turned` dimensions of heads are turned.
struct Rotation {
    const void *cos, *sin;
    int64_t turned;
};

// Pairs (i, i + turned / 2) of every head of x [rows, heads, dim] turned, and the rest as it is; `out` may be `x` with its
// strides. Where pairs are `interleaved`, (2 i, 2 i + 1), they become such pairs, and `out` is no part of `x`.
void rotary(bool is_bf16, const void* x, int64_t x_stride, int64_t head_stride, Rotation rotation, bool interleaved,
            void* out, int64_t out_stride, int64_t out_head_stride, int64_t rows, int64_t heads, int64_t dim);

// What a gate makes of its input: x / (1 + e^-x), and x Phi(x) with Phi's approximation by a tanh.
enum Activation : int64_t { SILU, GELU_TANH };

// out[rows, width] = activation(gate) * up, of rows of gate and up one after the other.
void gate_mul(bool is_bf16, int64_t activation, const void* gate_up, int64_t stride, void* out, int64_t rows,
              int64_t width);

// Rows of k and v [rows, kv_heads, dim], heads together, to the cache's blocks[row] and offsets[row]; of k alone where v is
// null.
void store_kv(const Cache& cache, const void* k, int64_t k_stride, const void* v, int64_t v_stride, const int64_t* blocks,
              const int64_t* offsets, int64_t rows);

// What attention needs of its projection [rows, (heads + 2 kv_heads) * dim]: q and k normed per head where there are
// weights, then turned; k and v stored, q left where it was, k lost. Bit for bit the same as the four functions above.
void qkv_to_cache(const Cache& cache, void* qkv, int64_t stride, int64_t heads, Norm q_norm, Norm k_norm, float eps,
                  Rotation rotation, const int64_t* blocks, const int64_t* offsets, int64_t rows);

}  // namespace penstock
