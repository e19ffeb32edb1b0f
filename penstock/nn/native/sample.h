// Rows of logits to tokens. A row's token depends on that row and its parameters alone.
#pragma once

#include <cstdint>
#include <vector>

namespace penstock {

// How one row is drawn; the fields are SamplingParams' own.
struct Draw {
    double temperature, top_p, min_p;
    int64_t top_k, key;  // of the noise: see ops/gumbel
};

// A token and its logit. The likely ones come first, equal ones by id.
struct Candidate {
    float value;
    int64_t id;
    bool operator<(const Candidate& other) const {
        return value > other.value || (value == other.value && id < other.id);
    }
};

// In `count` rows of logits [.., vocab], -inf for each token whose bit in that row's mask [count, words] is 0.
void mask_logits(float* logits, int64_t vocab, const int64_t* rows, int64_t count, const uint32_t* masks,
                 int64_t words);

// The first largest entry of each row [rows, vocab], a NaN being none, and whether all of the row are finite.
void argmax(const float* logits, int64_t rows, int64_t vocab, int64_t* tokens, uint8_t* finite);

// A token per row: temperature, min_p, top_k, top_p, then the largest sum of logit and noise; greedy at temperature 0.
void sample(const float* logits, int64_t rows, int64_t vocab, const Draw* draws, int64_t* tokens);

// The same of one row that is greedy or has a top_k, out of those of its logits that can matter; the list is used up.
int64_t sample(std::vector<Candidate>& likeliest, const Draw& draw);

}  // namespace penstock
