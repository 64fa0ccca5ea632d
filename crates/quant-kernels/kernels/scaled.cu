// Packed numbers times a scale of their tensor, row or block: FP8, INT8, NVFP4, MXFP8 and their kin.
#include "flat.cuh"

// What is multiplied besides the scale.
enum Global : u32 { NOTHING, FACTOR, TIMES_INPUT, INVERSE_OF_INPUT, PER_127 };
// The order of scales.
enum Order : u32 { ROWS, COLUMNS, SWIZZLED };

// A run whose first element begins a row of the matrix that scales are laid over.
struct Scaled {
    Run run;
    u64 scale;       // 0: there is none
    u64 zero_point;  // 0: there is none
    u64 global;
    u64 input;
    Divider columns;
    Divider height;  // of a block
    Divider width;
    u32 row;  // of the run's first element
    u32 block_rows;
    u32 block_columns;
    u32 order;
    u32 scale_kind;
    u32 zero_kind;
    u32 global_kind;
    u32 input_kind;
    u32 mode;
    u32 swap;  // nibbles: the first number of a byte is in its upper half
};

// Where a block's number lies among all.
DEVICE u64 place_of(u32 order, u32 rows, u32 columns, u32 row, u32 column) {
    switch (order) {
        case ROWS: return (u64)row * columns + column;
        case COLUMNS: return (u64)column * rows + row;
        default: break;
    }
    u64 tile = (u64)(row / 128) * ((columns + 3) / 4) + column / 4;
    return tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + column % 4;
}
// As before, where the numbers of one thread lie in several blocks.
RARE u64 place_beside(u32 order, u32 rows, u32 columns, u32 row, u32 column) {
    return place_of(order, rows, columns, row, column);
}

// N packed numbers of a byte each.
struct E4m3 {
    static constexpr u32 ELEMENTS = 1, BYTES = 1;
    STATIC float number(u32 word, u32 index) { return e4m3_above(choose(0, word, 0x4000 + 0x1000 * index)); }
};
struct E5m2 {
    static constexpr u32 ELEMENTS = 1, BYTES = 1;
    STATIC float number(u32 word, u32 index) { return from_half(choose(word, 0, 0x4404 | index << 4)); }
};
struct Int8 {
    static constexpr u32 ELEMENTS = 1, BYTES = 1;
    STATIC float number(u32 word, u32 index) { return signed_byte(word, index); }
};
// Two a byte.
struct E2m1 {
    static constexpr u32 ELEMENTS = 2, BYTES = 1;
    STATIC float number(u32 word, u32 index) { return e2m1_above(word << (28 - 4 * index)); }
};

template <class C> struct Packed {
    static constexpr u32 ELEMENTS = C::ELEMENTS, BYTES = C::BYTES, ENTRIES = 2;

    // The two factors that all numbers have in common.
    STATIC void prepare(const Scaled& p, u32* table) {
        if (threadIdx.x != 0) return;
        float first = 1.0f, last = 1.0f;
        switch (p.mode) {
            case FACTOR: first = number_at(p.global, p.global_kind, 0); break;
            case TIMES_INPUT: last = number_at(p.global, p.global_kind, 0) * number_at(p.input, p.input_kind, 0); break;
            case INVERSE_OF_INPUT: {
                float input = 2688.0f / number_at(p.input, p.input_kind, 0);
                last = 1.0f / (input * number_at(p.global, p.global_kind, 0)) * input;
                break;
            }
            case PER_127: last = 1.0f / 127.0f; break;
            default: break;
        }
        table[0] = bits_of(first);
        table[1] = bits_of(last);
    }

    template <u32 N>
    STATIC void decode(const Scaled& p, const u32* table, Bytes tile, u32 place, u32 element, float (&v)[N]) {
        constexpr u32 WORDS = N / ELEMENTS / 4 ? N / ELEMENTS / 4 : 1, EACH = N / WORDS;
        u32 words[WORDS];
        tile.template take<WORDS * 4>(place / ELEMENTS, words);
        if (ELEMENTS == 2 && p.swap) {
            for (u32 i = 0; i < WORDS; ++i) words[i] = (words[i] >> 4 & 0x0f0f0f0f) | (words[i] & 0x0f0f0f0f) << 4;
        }
        for (u32 i = 0; i < N; ++i) v[i] = C::number(words[i / EACH], i % EACH);

        float first = float_of(table[0]), last = float_of(table[1]);
        u32 row = p.columns.quotient(element), column = element - row * p.columns.divisor;
        u32 across = p.width.quotient(column), within = column - across * p.width.divisor;
        if (within + N <= p.width.divisor && column + N <= p.columns.divisor) {
            u64 block = place_of(p.order, p.block_rows, p.block_columns, p.height.quotient(p.row + row), across);
            float scale = p.scale ? number_at(p.scale, p.scale_kind, block) * first : 1.0f;
            float zero_point = p.zero_point ? number_at(p.zero_point, p.zero_kind, block) : 0.0f;
            if (p.zero_point) {
                for (u32 i = 0; i < N; ++i) v[i] = v[i] - zero_point;
            }
            if (p.scale) {
                for (u32 i = 0; i < N; ++i) v[i] = v[i] * scale * last;
            }
            return;
        }
        // The end of a block or row lies among these: each looks for its own.
        for (u32 i = 0; i < N; ++i) {
            if (element + i >= p.run.end) return;
            u32 mine = p.columns.quotient(element + i), beside = element + i - mine * p.columns.divisor;
            u32 below = p.height.quotient(p.row + mine);
            u64 block = place_beside(p.order, p.block_rows, p.block_columns, below, p.width.quotient(beside));
            if (p.zero_point) v[i] = v[i] - number_beside(p.zero_point, p.zero_kind, block);
            if (p.scale) v[i] = v[i] * (number_beside(p.scale, p.scale_kind, block) * first) * last;
        }
    }
};

FLAT(scaled_e4m3, Scaled, Packed<E4m3>)
FLAT(scaled_e5m2, Scaled, Packed<E5m2>)
FLAT(scaled_int8, Scaled, Packed<Int8>)
FLAT(scaled_e2m1, Scaled, Packed<E2m1>)
