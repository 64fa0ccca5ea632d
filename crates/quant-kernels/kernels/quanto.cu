// The formats of optimum-quanto below a byte: unsigned numbers of 4 or 2 bits in groups, each with a scale and a shift. A byte holds
// numbers of groups that are far apart; a run takes one of them from each byte.
#include "flat.cuh"

// A run whose first element begins a group.
struct Quanto {
    Run run;
    u64 scale;
    u64 shift;
    Divider group;
    u32 bit;   // the lowest bit of the run's numbers
    u32 mask;  // the bits of a number, before shifting
    u32 scale_kind;
    u32 shift_kind;
};

// A shift that is an integer is subtracted from the packed number, another from what comes of number and scale; each step is
// rounded to the scale's type.
DEVICE float shifted_and_scaled(const Quanto& p, float code, float scale, float shift) {
    if (p.shift_kind == F32 || p.shift_kind == F16 || p.shift_kind == BF16) {
        return rounded_to(rounded_to(scale * code, p.scale_kind) - shift, p.scale_kind);
    }
    return rounded_to(scale * (code - shift), p.scale_kind);
}

struct Bits {
    static constexpr u32 ELEMENTS = 1, BYTES = 1, ENTRIES = 1;

    STATIC void prepare(const Quanto&, u32*) {}

    template <u32 N>
    STATIC void decode(const Quanto& p, const u32*, Bytes tile, u32 place, u32 element, float (&v)[N]) {
        u32 words[N / 4];
        tile.template take<N>(place, words);
        for (u32 i = 0; i < N; ++i) v[i] = integer(words[i / 4] >> (8 * (i % 4) + p.bit) & p.mask);
        u32 group = p.group.quotient(element), within = element - group * p.group.divisor;
        if (within + N <= p.group.divisor) {
            float scale = number_at(p.scale, p.scale_kind, group), shift = number_at(p.shift, p.shift_kind, group);
            for (u32 i = 0; i < N; ++i) v[i] = shifted_and_scaled(p, v[i], scale, shift);
            return;
        }
        for (u32 i = 0; i < N && element + i < p.run.end; ++i) {
            u32 mine = p.group.quotient(element + i);
            float scale = number_beside(p.scale, p.scale_kind, mine);
            v[i] = shifted_and_scaled(p, v[i], scale, number_beside(p.shift, p.shift_kind, mine));
        }
    }
};

FLAT(quanto, Quanto, Bits)
