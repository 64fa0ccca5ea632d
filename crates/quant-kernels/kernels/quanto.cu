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

// Groups of so many elements and more have all their numbers worked out once a tile: there are fewer codes than elements. 16 codes are
// half of shared memory's banks, so that the threads of a warp, which look into two groups, do not wait for each other.
constexpr u32 LONG = 64, CODES = 16, MOST_GROUPS = THREADS * 8 * ROUNDS / LONG + 2;

struct Bits {
    static constexpr u32 ELEMENTS = 1, BYTES = 1, ENTRIES = MOST_GROUPS * CODES + 1;

    STATIC void prepare(const Quanto&, u32*) {}

    // The numbers of the tile's groups, and which group is the first.
    STATIC void enter(const Quanto& p, u32* table, u32 begin, u32 count) {
        if (p.group.divisor < LONG) return;
        u32 first = p.group.quotient(begin), end = begin + count < p.run.end ? begin + count : p.run.end;
        u32 groups = p.group.quotient(end - 1) - first + 1;
        if (threadIdx.x == 0) table[MOST_GROUPS * CODES] = first;
        for (u32 i = threadIdx.x; i < groups * CODES; i += THREADS) {
            u32 group = first + i / CODES, code = i % CODES;
            if (code <= p.mask) {
                float scale = number_at(p.scale, p.scale_kind, group), shift = number_at(p.shift, p.shift_kind, group);
                table[i] = bits_of(shifted_and_scaled(p, integer(code), scale, shift));
            }
        }
    }

    template <u32 N>
    STATIC void decode(const Quanto& p, const u32* table, Bytes tile, u32 place, u32 element, float (&v)[N]) {
        u32 words[N / 4];
        tile.template take<N>(place, words);
        u32 group = p.group.quotient(element), within = element - group * p.group.divisor;
        if (p.group.divisor >= LONG) {
            const u32* mine = table + (group - table[MOST_GROUPS * CODES]) * CODES;
            for (u32 i = 0; i < N / 4; ++i) words[i] >>= p.bit;
            if (within + N <= p.group.divisor) {
                for (u32 i = 0; i < N; ++i) v[i] = float_of(mine[words[i / 4] >> 8 * (i % 4) & p.mask]);
                return;
            }
            // The group's end lies among these.
            for (u32 i = 0; i < N && element + i < p.run.end; ++i) {
                u32 next = within + i < p.group.divisor ? 0 : CODES;
                v[i] = float_of(mine[next + (words[i / 4] >> 8 * (i % 4) & p.mask)]);
            }
            return;
        }
        for (u32 i = 0; i < N && element + i < p.run.end; ++i) {
            u32 mine = p.group.quotient(element + i);
            float code = integer(words[i / 4] >> (8 * (i % 4) + p.bit) & p.mask);
            float scale = number_beside(p.scale, p.scale_kind, mine);
            v[i] = shifted_and_scaled(p, code, scale, number_beside(p.shift, p.shift_kind, mine));
        }
    }
};

FLAT(quanto, Quanto, Bits)
