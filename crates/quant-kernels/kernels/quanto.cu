// The formats of optimum-quanto below a byte: unsigned numbers of 4 or 2 bits in groups, each with a scale and a shift. A byte holds
// numbers of groups that are far apart, its parts. All of them that are wanted are decoded together, so that bytes are read once.
#include "flat.cuh"

// A run of bytes whose first one begins a group: `run` counts bytes, and says where numbers of the first part go.
struct Quanto {
    Run run;
    u64 scale;   // of the first part's first group; so all below
    u64 shift;
    u64 stride;  // numbers from one part to the next
    Divider group;
    u32 groups;  // from one part to the next
    u32 first;   // the first part that is wanted
    u32 end;     // the one behind the last
    u32 scale_kind;
    u32 shift_kind;
    u32 unused;
};

// A number of a type that models compute in, rounded to it.
template <u32 KIND> DEVICE float rounded(float number) {
    if (KIND == BF16) return float_of(bf16_above(number) & 0xffff0000);
    return KIND == F16 ? from_half(to_half(number)) : number;
}
// A shift that is an integer is subtracted from the packed number, another from what comes of number and scale; each step is
// rounded to the scale's type.
template <u32 KIND> DEVICE float shifted_and_scaled(bool whole, float code, float scale, float shift) {
    return whole ? rounded<KIND>(scale * (code - shift)) : rounded<KIND>(rounded<KIND>(scale * code) - shift);
}

// A target's numbers, rounded to a type before, as tables have them, and out of there: stored alone, and as many as are 16 bytes.
template <class T> struct Encoded;
template <> struct Encoded<Float> {
    template <u32> STATIC u32 of(float number) { return bits_of(number); }
    STATIC void one(u64 address, u32 bits) { *(u32*)address = bits; }
    STATIC void wide(u64 address, const u32* bits) { store_vector((void*)address, {bits[0], bits[1], bits[2], bits[3]}); }
};
// Two numbers become a word by one instruction.
template <u32 NIBBLES> DEVICE void store_pairs(u64 address, const u32* bits) {
    store_vector((void*)address, {choose(bits[0], bits[1], NIBBLES), choose(bits[2], bits[3], NIBBLES),
                                  choose(bits[4], bits[5], NIBBLES), choose(bits[6], bits[7], NIBBLES)});
}
template <> struct Encoded<Brain> {
    template <u32 KIND> STATIC u32 of(float number) { return KIND == BF16 ? bits_of(number) : bf16_above(number); }
    STATIC void one(u64 address, u32 bits) { *(u16*)address = (u16)(bits >> 16); }
    STATIC void wide(u64 address, const u32* bits) { store_pairs<0x7632>(address, bits); }
};
template <> struct Encoded<Half> {
    template <u32> STATIC u32 of(float number) { return to_half(number); }
    STATIC void one(u64 address, u32 bits) { *(u16*)address = (u16)bits; }
    STATIC void wide(u64 address, const u32* bits) { store_pairs<0x5410>(address, bits); }
};

// Groups of so many elements and more have all their numbers worked out once a tile: there are fewer codes than elements. 16 codes are
// half of shared memory's banks, so that the threads of a warp, which look into two groups, do not wait for each other.
constexpr u32 LONG = 64, NOWHERE = ~0u;

template <u32 BITS, class T> struct Bits {
    static constexpr u32 N = WIDE<T>, PARTS = 8 / BITS, CODES = 1 << BITS, TILE = THREADS * N * ROUNDS;
    static constexpr u32 MOST_GROUPS = TILE / LONG + 2, ENTRIES = PARTS * MOST_GROUPS * CODES;

    // The numbers of all groups of a tile, four of them at a time. SAME: shifts are of the scales' type, so that both are asked for before
    // one is waited for.
    template <u32 KIND, bool SAME> STATIC void fill(const Quanto& p, u32* table, u32 first, u32 groups) {
        constexpr u32 FOURS = CODES / 4;
        bool whole = !SAME && !(p.shift_kind == F32 || p.shift_kind == F16 || p.shift_kind == BF16);
        for (u32 i = threadIdx.x; i < (p.end - p.first) * groups * FOURS; i += THREADS) {
            u32 part = 0, within = i / FOURS;
            for (; within >= groups; within -= groups) ++part;
            u64 group = (u64)part * p.groups + first + within;
            float scale, shift;
            if (SAME) {
                u32 both[2] = {load((const u16*)p.scale + group), load((const u16*)p.shift + group)};
                scale = KIND == BF16 ? float_of(both[0] << 16) : from_half(both[0]);
                shift = KIND == BF16 ? float_of(both[1] << 16) : from_half(both[1]);
            } else {
                scale = number_at(p.scale, p.scale_kind, group), shift = number_at(p.shift, p.shift_kind, group);
            }
            u32 numbers[4];
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                float code = integer(i % FOURS * 4 + j);
                numbers[j] = Encoded<T>::template of<KIND>(shifted_and_scaled<KIND>(whole, code, scale, shift));
            }
            *(Vector*)(table + ((part * MOST_GROUPS + within) * FOURS + i % FOURS) * 4) = {numbers[0], numbers[1], numbers[2], numbers[3]};
        }
    }
    STATIC void enter(const Quanto& p, u32* table, u32 first, u32 last) {
        u32 groups = last - first + 1;
        switch (p.scale_kind) {
            case BF16: p.shift_kind == BF16 ? fill<BF16, true>(p, table, first, groups) : fill<BF16, false>(p, table, first, groups); break;
            case F16: p.shift_kind == F16 ? fill<F16, true>(p, table, first, groups) : fill<F16, false>(p, table, first, groups); break;
            default: fill<F32, false>(p, table, first, groups); break;
        }
    }

    // One number without a table, of the part that is so many behind the first.
    STATIC u32 alone(const Quanto& p, u32 part, u32 code, u32 element) {
        u64 group = (u64)part * p.groups + p.group.quotient(element);
        float scale = number_beside(p.scale, p.scale_kind, group), shift = number_beside(p.shift, p.shift_kind, group);
        bool whole = !(p.shift_kind == F32 || p.shift_kind == F16 || p.shift_kind == BF16);
        float number = whole ? rounded_to(scale * (integer(code) - shift), p.scale_kind)
                             : rounded_to(rounded_to(scale * integer(code), p.scale_kind) - shift, p.scale_kind);
        return Encoded<T>::template of<F32>(number);
    }

    // The numbers of one part out of N bytes. `row` is where the table has those of its group, in bytes, or NOWHERE.
    STATIC void decode(const Quanto& p, const u32* table, u32 row, const u32* words, u32 part, u32 element, bool whole, u64 out) {
        u32 numbers[N], bit = part * BITS;
        if (row == NOWHERE) {
#pragma unroll 1
            for (u32 i = 0; i < N && element + i < p.run.end; ++i) {
                u32 code = (i < 4 ? words[0] : words[N / 4 - 1]) >> (i % 4 * 8 + bit) & (CODES - 1);
                u32 number = alone(p, part - p.first, code, element + i);
                if (element + i >= p.run.first) Encoded<T>::one(out + i * T::SIZE, number);
            }
            return;
        }
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            // A code is an offset in bytes as it comes out of its word, and rows begin at multiples of what codes reach.
            u32 at = i % 4 * 8 + bit, word = words[i / 4];
            u32 offset = ((at < 2 ? word << 2 : word >> (at - 2)) & (CODES - 1) * 4) | row;
            numbers[i] = *(const u32*)((const u8*)table + offset);
        }
        if (whole || (out % 16 == 0 && element >= p.run.first && element + N <= p.run.end)) {
            Encoded<T>::wide(out, numbers);
        } else {
#pragma unroll
            for (u32 i = 0; i < N; ++i) {
                if (element + i >= p.run.first && element + i < p.run.end) Encoded<T>::one(out + i * T::SIZE, numbers[i]);
            }
        }
    }
};

template <u32 BITS, class T> DEVICE void quanto(const Quanto& p) {
    typedef Bits<BITS, T> Format;
    constexpr u32 N = Format::N, TILE = Format::TILE;
    const Run& run = p.run;
    SHARED(u32, stage, TILE / 4 + 12);
    SHARED(u32, table, Format::ENTRIES);
    bool tables = p.group.divisor >= LONG;
    for (u32 tile = blockIdx.x; tile < run.tiles; tile += gridDim.x) {
        u32 begin = run.begin + tile * TILE, end = begin + TILE < run.end ? begin + TILE : run.end, left = run.bytes - begin;
        u32 group = p.group.quotient(begin);
        u64 from = run.data + begin;
        EACH_THREAD {
            fetch<TILE>(stage, from, left < TILE ? left : TILE);
            if (tables) Format::enter(p, table, group, p.group.quotient(end - 1));
        }
        BARRIER();
        // Where byte 0 would put its number, if it did.
        u64 to = run.out - (u64)run.first * T::SIZE;
        bool whole = begin >= run.first && begin + TILE <= run.end && (to | p.stride * T::SIZE) % 16 == 0;
        EACH_THREAD {
            // A round is whole words: where a thread's bytes lie in them is the same in each, and worked out once.
            u32 place = threadIdx.x * N;
#pragma unroll 1
            for (u32 round = 0; round < ROUNDS; ++round) {
                u32 element = begin + round * THREADS * N + place;
                if (!whole && (element >= run.end || element + N <= run.first)) continue;
                Bytes packed = {stage + round * THREADS * N / 4, (u32)from & 15};
                u32 words[N / 4];
                packed.template take<N>(place, words);
                u32 mine = p.group.quotient(element), within = element - mine * p.group.divisor, row = NOWHERE;
                if (tables && within + N <= p.group.divisor) row = (mine - group) * (Format::CODES * 4);
                u64 out = to + (u64)element * T::SIZE;
#pragma unroll
                for (u32 part = 0; part < Format::PARTS; ++part) {
                    if (part >= p.first && part < p.end) {
                        Format::decode(p, table, row, words, part, element, whole, out);
                        if (row != NOWHERE) row += Format::MOST_GROUPS * Format::CODES * 4;
                        out += p.stride * T::SIZE;
                    }
                }
            }
        }
        BARRIER();
    }
}

#define QUANTO(NAME, BITS)                                                                                                     \
    KERNEL(NAME##_f32, Quanto, quanto<BITS, Float>)                                                                            \
    KERNEL(NAME##_bf16, Quanto, quanto<BITS, Brain>)                                                                           \
    KERNEL(NAME##_f16, Quanto, quanto<BITS, Half>)
QUANTO(quanto4, 4)
QUANTO(quanto2, 2)
