// x @ weight.T + bias over weights of few bits, and rows of such weights.
//
// A weight is scale * (code - zero), with a scale and a zero for each output and each `group` of inputs that follow one
// another. What is multiplied with whole codes is in 8 bits too: of a row, up to 128 inputs of one group, a run, share a
// scale, and their products with codes are summed up as whole numbers, which is exact. Codes that are floats of 8 bits are
// multiplied with inputs as they are. What runs come to is summed up in float32, in the order of the inputs.
//
// A row's results do not depend on the others, to the bit, nor on threads: there is one arithmetic for all numbers of
// rows. Those of whole codes are the same bits on every processor.
//
// Packed, a weight is a row of panels of QUANTISED_GROUPS * 16 outputs, the last of as many groups of 16 as are left. A
// panel is read from its first byte to its last, in lines of 64 bytes. For each group of inputs it has the scales of its
// outputs and their zeros, filled up to whole lines, and then run by run the codes.
#pragma once

#include "gemm.h"

namespace penstock {

#if defined(__AVX512F__)
constexpr int QUANTISED_GROUPS = 4;
#else
constexpr int QUANTISED_GROUPS = 1;
#endif
constexpr int64_t RUN = 128;

enum Scales : int64_t { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// Attributes:
//   group: inputs that share a scale; 0 is all.
//   bits: of a code, 2, 3, 4 or 8; 0 for e4m3, which has no zeros.
//   scales: their type, and that of zeros.
//   has_zeros: zeros are stored; otherwise all are `zero`.
//   order: [ins] which of x's inputs each of the weight's is multiplied with, or null for the same.
struct Quantised {
    const Line* lines;
    int64_t outs, ins, group, bits, scales, has_zeros, zero;
    const int32_t* order;

    int64_t groups() const { return (outs + LANES - 1) / LANES; }
    int64_t width() const { return group ? std::min(group, ins) : ins; }  // of a group of inputs
};

// Rows of x, row by row `x_stride` elements apart, to rows of out, of T or float. `bias` may be null.
template <class T, class Out>
void linear(const Quantised& weight, const T* x, int64_t x_stride, int64_t rows, const T* bias, Out* out,
            int64_t out_stride);

// The product after the next loop is with this weight (pool.h).
void read_next(const Quantised& weight);

// The same in parts. First rows become what all weights of this kind are multiplied with, whatever their lines and outputs; it
// holds until this thread's next product. Then any thread multiplies some of these rows, by itself.
struct Inputs;
template <class T>
const Inputs& prepare(const Quantised& kind, const T* x, int64_t x_stride, int64_t rows);
template <class T>
void linear(const Quantised& weight, const Inputs& inputs, int64_t row, int64_t rows, T* out, int64_t out_stride);

// Rows of the weight, as an embedding looks them up: [tokens] -> [tokens, ins].
template <class T>
void gather(const Quantised& weight, const int64_t* tokens, int64_t count, T* out);

}  // namespace penstock
