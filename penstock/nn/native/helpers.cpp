#include "helpers.h"

#include "pool.h"

namespace penstock {
namespace {

// A split for this rank to compute, the first that is open.
struct Found {
    Area* area;
    PostedSplit* split;
    uint64_t state;
};

Found find(const Helpers& helpers) {
    for (int64_t who = 0; who < helpers.size; who++) {
        if (who == helpers.number) continue;
        Area& area = helpers.area(who);
        const int64_t posted = area.posted.load();
        for (int64_t i = 0; i < posted; i++) {
            const uint64_t state = area.splits[i].state.load();
            if (phase_of(state) == OPEN && helper_of(state) == helpers.number) return {&area, &area.splits[i], state};
        }
    }
    return {};
}

void help(const Helpers& helpers) {
    for (Found found = find(helpers); found.area; found = find(helpers)) {
        if (!claim(*found.split, found.state)) continue;
        attend_for(*found.area, *found.split, helpers.copies[found.area->layer]);
        found.split->state.store((found.state & ~uint64_t{3}) | DONE);
        ring(found.area->bell);
    }
}

// Who has not come to the meeting yet; -1 is nobody.
int64_t late(const Helpers& helpers, uint32_t meeting) {
    for (int64_t who = 0; who < helpers.size; who++)
        if (static_cast<int32_t>(helpers.area(who).passed.load() - meeting) < 0) return who;
    return -1;
}

}  // namespace
}  // namespace penstock

extern "C" {

using namespace penstock;

// Of memory that begins as zeros.
int64_t penstock_helpers_bytes(int64_t size) { return size * AREA_BYTES; }

// A rank's own view of that memory; never freed, as ranks are not.
int64_t penstock_helpers_open(void* memory, Ranks* ranks, int64_t number, int64_t size, int64_t stride, int64_t offset,
                              const Cache* copies, int64_t layers) {
    return reinterpret_cast<int64_t>(new Helpers{ranks, static_cast<char*>(memory), number, size, stride, offset,
                                                 std::vector<Cache>(copies, copies + layers)});
}

// This rank has attended, and comes to the next meeting. If it `helps`, it attends for others until they have, too.
int64_t penstock_helpers_pass(Helpers* helpers, int64_t helps) {
    Area& own = helpers->area(helpers->number);
    const uint32_t meeting = own.passed.fetch_add(1) + 1;
    for (int64_t who = 0; who < helpers->size; who++)
        if (who != helpers->number) ring(helpers->area(who).bell);
    if (!helps) return MET;
    for (;;) {
        if (find(*helpers).area) parallel_for(threads(), [&](int) { help(*helpers); });
        const int64_t awaited = late(*helpers, meeting);
        if (awaited < 0) return MET;
        const int32_t sleeps = static_cast<int32_t>(awaited * helpers->stride + helpers->offset + 1);
        const auto there = [&] { return find(*helpers).area || late(*helpers, meeting) < 0; };
        if (const int64_t status = wait_until(*helpers->ranks, own.bell, sleeps, there)) return status;
    }
}

int64_t penstock_attention_with(Helpers* helpers, int64_t layer, const Part* parts, int64_t count, const Span* spans,
                                int64_t span_count, const int64_t* ids, const Cache* cache, int64_t heads, const void* q,
                                int64_t q_stride, void* out, float scale, int64_t* helped) {
    return attention_with(*helpers, layer, parts, count, {spans, span_count, ids, heads}, *cache, q, q_stride, out, scale,
                          helped);
}
}
