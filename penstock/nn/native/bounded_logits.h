// Tokens of rows without all of their logits: the last projection in 8 bits says which can be large enough,
// and only those are computed. As a VA-file does it for nearest neighbours (Weber, Schek and Blott, VLDB 1998).
//
// A weight row w is s * q + e: whole numbers q from -127 to 127, a scale s, and what is left. An input row x is the same
// but for the few numbers furthest from 0, which have 16 bits. Of the product of both in whole numbers, which is exact, a
// logit is away by no more than
//
//     |e| |x| + |s q| |what is left of x| + what rounding can do to the logit itself
//
// (Cauchy and Schwarz), so it has bounds. Whatever may be among a row's k largest has an upper bound of at least the
// k-th largest lower one. Logits that are computed are `linear`'s to the bit, so tokens are the same. Of a row that may not
// take all outputs, only those that it may take count; where they are few, all of them are computed, without bounds.
#pragma once

#include "gemm.h"
#include "sample.h"

namespace penstock {

// Attributes:
//   codes: q + 128, packed.
//   bounds: [3][groups * 16], for every output its scale, the most that |e| is, and the most that |w| and |s q| are.
struct BoundedLogits {
    Packed<uint8_t> codes;
    const float* bounds;
};

// Which outputs some rows may take, as `mask_logits` has it; the others may take all.
struct RowMasks {
    const int64_t* rows;
    int64_t count;
    const uint32_t* masks;
    int64_t words;
};

// A token for each row that is greedy or has a top_k; -1 where none can be told, as of numbers that are not finite.
template <class T>
void choose(const Packed<T>& weight, const BoundedLogits& quantized, const T* x, int64_t x_stride, int64_t rows, const Draw* draws,
            const RowMasks& masks, int64_t* tokens);

// Of a weight that is some of the outputs of a larger one: what `choose` needs to know of them, [rows][most] logits and the
// outputs they are of, so many as a row's draw can take and -1 behind them. A row's first is -2 where none can be told.
template <class T>
void candidates(const Packed<T>& weight, const BoundedLogits& quantized, const T* x, int64_t x_stride, int64_t rows, const Draw* draws,
                int64_t most, float* values, int64_t* outputs);

}  // namespace penstock
