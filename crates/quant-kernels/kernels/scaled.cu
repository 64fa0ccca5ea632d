// Packed numbers times a scale of their tensor, row or block: FP8, INT8, NVFP4, MXFP8 and their kin.
#include "flat.cuh"

// What is multiplied besides the scale, or divides it.
enum Global : u32 { NOTHING, FACTOR, TIMES_INPUT, INVERSE_OF_INPUT, PER_127, DIVISOR };
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
    Divider strip;  // elements that follow each other and share a scale, over the ends of rows; 2^31 where they cannot be counted so
    u32 row;  // of the run's first element
    u32 block_rows;
    u32 block_columns;
    u32 order;
    u32 scale_kind;
    u32 zero_kind;
    u32 global_kind;
    u32 input_kind;
    u32 mode;
    u32 swap;   // nibbles: the first number of a byte is in its upper half
    u32 fours;  // scales are bytes of E4M3 or E8M0, of which four that begin at a multiple of four are those of four strips of a row
    u32 unused;
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

// The scales of four strips, the first one of which begins with an element; see Scaled::fours.
DEVICE u32 four_scales(const Scaled& p, u32 element) {
    u32 row = p.columns.quotient(element), beside = p.strip.quotient(element - row * p.columns.divisor);
    return load((const u32*)(p.scale + place_of(p.order, p.block_rows, p.block_columns, p.row + row, beside)));
}

// N bytes that are FP8, made numbers by way of f16, two at a time: each is the upper byte of a half.
template <u32 N> DEVICE void by_halves(u32 pair, u32 index, float factor, float (&v)[N]) {
    v[index] = from_half(pair & 0xffff) * factor;
    v[index + 1] = from_half(pair >> 16) * factor;
}
// Two neighbours of a word as the upper bytes of halves.
DEVICE u32 upper_bytes(u32 word, u32 first) { return choose(word, 0, first == 0 ? 0x1404 : 0x3424); }

// What scales are multiplied with, or divided by.
DEVICE float common(const Scaled& p) {
    return p.mode == FACTOR || p.mode == DIVISOR ? number_at(p.global, p.global_kind, 0) : 1.0f;
}
DEVICE float whole(const Scaled& p, float scale, float common) { return p.mode == DIVISOR ? scale / common : scale * common; }
// What numbers are multiplied with after that, if it is not 1.
DEVICE bool has_last(const Scaled& p) { return p.mode > FACTOR && p.mode != DIVISOR; }
DEVICE float last_of(const Scaled& p) {
    switch (p.mode) {
        case TIMES_INPUT: return number_at(p.global, p.global_kind, 0) * number_at(p.input, p.input_kind, 0);
        case INVERSE_OF_INPUT: {
            float input = 2688.0f / number_at(p.input, p.input_kind, 0);
            return 1.0f / (input * number_at(p.global, p.global_kind, 0)) * input;
        }
        case PER_127: return 1.0f / 127.0f;
        default: return 1.0f;
    }
}

// Packed numbers: N of them, from words.
struct E4m3 {
    static constexpr u32 ELEMENTS = 1, BYTES = 1;
    // Whether scales may come four at a time, as those of formats that have many do.
    static constexpr bool FOURS = true;
    template <u32 N> STATIC void numbers(const u32* words, float (&v)[N]) {
        u32 nan = 0;
        for (u32 i = 0; i < N; i += 4) {
            // With an exponent of 4 bits in the place of 5 a half is smaller by 2^8, subnormal or not.
            for (u32 j = 0; j < 4; j += 2) {
                u32 pair = upper_bytes(words[i / 4], j);
                by_halves<N>((pair & 0x7f007f00) >> 1 | (pair & 0x80008000), i + j, 256.0f, v);
            }
            nan |= (words[i / 4] & 0x7f7f7f7f) + 0x01010101;
        }
        // All seven bits set are no number.
        if (nan & 0x80808080) {
            for (u32 i = 0; i < N; ++i) {
                if ((words[i / 4] >> 8 * (i % 4) & 0x7f) == 0x7f) v[i] = float_of(0x7fffffff);
            }
        }
    }
};
struct E5m2 {
    static constexpr u32 ELEMENTS = 1, BYTES = 1;
    static constexpr bool FOURS = false;
    template <u32 N> STATIC void numbers(const u32* words, float (&v)[N]) {
        for (u32 i = 0; i < N; i += 2) by_halves<N>(upper_bytes(words[i / 4], i % 4), i, 1.0f, v);
    }
};
struct Int8 {
    static constexpr u32 ELEMENTS = 1, BYTES = 1;
    static constexpr bool FOURS = false;
    template <u32 N> STATIC void numbers(const u32* words, float (&v)[N]) {
        for (u32 i = 0; i < N; ++i) v[i] = signed_byte(words[i / 4], i % 4);
    }
};
// Two a byte. With the exponent's last two bits in its place, and the sign, a half is smaller by 2^14, subnormal or not.
struct E2m1 {
    static constexpr u32 ELEMENTS = 2, BYTES = 1;
    static constexpr bool FOURS = false;
    template <u32 N> STATIC void numbers(const u32* words, float (&v)[N]) { in_order<false>(words[0], v); }
    // HIGH: the first number of a byte is in its upper half.
    template <bool HIGH, u32 N> STATIC void in_order(u32 word, float (&v)[N]) {
        // The upper bytes of the halves of those in lower bits, and of the others.
        u32 low = (word << 4 & 0x80808080) | (word << 1 & 0x0e0e0e0e), high = (word & 0x80808080) | (word >> 3 & 0x0e0e0e0e);
        for (u32 i = 0; i < N / 2; i += 2) {
            u32 pair = upper_bytes(low, i), other = upper_bytes(high, i);
            v[2 * i + HIGH] = from_half(pair & 0xffff) * 16384.0f, v[2 * i + !HIGH] = from_half(other & 0xffff) * 16384.0f;
            v[2 * i + 2 + HIGH] = from_half(pair >> 16) * 16384.0f, v[2 * i + 2 + !HIGH] = from_half(other >> 16) * 16384.0f;
        }
    }
};

// Strips of so many elements and more have their scales looked up once a tile.
constexpr u32 LONG = 16, MOST_STRIPS = THREADS * 8 * ROUNDS / LONG + 8, SCALES = 8, ZERO_POINTS = SCALES + MOST_STRIPS;

template <class C> struct Packed {
    static constexpr u32 ELEMENTS = C::ELEMENTS, BYTES = C::BYTES, ENTRIES = ZERO_POINTS + MOST_STRIPS;

    // What all numbers have in common: two factors, and scale and zero point if there is but one of each.
    STATIC void prepare(const Scaled& p, u32* table) {
        if (threadIdx.x != 0) return;
        float first = common(p), last = last_of(p);
        table[0] = bits_of(first);
        table[1] = bits_of(last);
        table[2] = bits_of(p.scale ? whole(p, number_at(p.scale, p.scale_kind, 0), first) : 1.0f);
        table[3] = bits_of(p.zero_point ? number_at(p.zero_point, p.zero_kind, 0) : 0.0f);
    }

    // Whether each tile looks up the scales of its strips.
    STATIC bool by_strips(const Scaled& p) {
        return (p.block_rows > 1 || p.block_columns > 1) && p.strip.divisor >= LONG && p.strip.divisor < 1u << 31;
    }
    // The scales of four strips at a time.
    STATIC void enter_fours(const Scaled& p, u32* table, u32 first, u32 last) {
        if (threadIdx.x == 0) table[4] = first * 4;
        for (u32 i = threadIdx.x; i <= last - first; i += THREADS) {
            u32 bytes = four_scales(p, (first + i) * 4 * p.strip.divisor);
            float scales[4], factor = common(p);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) {
                scales[j] = p.scale_kind == E4M3 ? e4m3_above(bytes << (24 - 8 * j)) : e8m0(bytes >> 8 * j & 255);
                scales[j] = whole(p, scales[j], factor);
            }
            *(Vector*)(table + SCALES + 4 * i) = {bits_of(scales[0]), bits_of(scales[1]), bits_of(scales[2]), bits_of(scales[3])};
        }
    }
    // The scales and zero points of a tile's strips, and which strip is the first.
    STATIC void enter(const Scaled& p, u32* table, u32 begin, u32 count) {
        if (!by_strips(p)) return;
        u32 first = p.strip.quotient(begin), end = begin + count < p.run.end ? begin + count : p.run.end;
        u32 strips = p.strip.quotient(end - 1) - first + 1;
        if (C::FOURS && p.fours) {
            enter_fours(p, table, first / 4, (first + strips - 1) / 4);
            return;
        }
        if (threadIdx.x == 0) table[4] = first;
        for (u32 i = threadIdx.x; i < strips; i += THREADS) {
            u32 element = (first + i) * p.strip.divisor;
            u32 row = p.columns.quotient(element), column = element - row * p.columns.divisor;
            u32 below = p.height.quotient(p.row + row), beside = p.width.quotient(column);
            u64 block = place_of(p.order, p.block_rows, p.block_columns, below, beside);
            if (p.scale) table[SCALES + i] = bits_of(whole(p, number_at(p.scale, p.scale_kind, block), common(p)));
            if (p.zero_point) table[ZERO_POINTS + i] = bits_of(number_at(p.zero_point, p.zero_kind, block));
        }
    }

    // What comes of N numbers that share a scale.
    template <u32 N> STATIC void multiply(const Scaled& p, float zero_point, float scale, float last, float (&v)[N]) {
        if (p.zero_point) {
            for (u32 i = 0; i < N; ++i) v[i] = v[i] - zero_point;
        }
        if (!p.scale) return;
        for (u32 i = 0; i < N; ++i) v[i] = v[i] * scale;
        for (u32 i = 0; i < N; ++i) v[i] = v[i] * last;
    }

    template <u32 N>
    STATIC void decode(const Scaled& p, const u32* table, Bytes tile, u32 place, u32 element, float (&v)[N]) {
        constexpr u32 WORDS = N / ELEMENTS / 4 ? N / ELEMENTS / 4 : 1;
        u32 words[WORDS];
        tile.template take<WORDS * 4>(place / ELEMENTS, words);
        if (ELEMENTS == 2 && p.swap) words[0] = (words[0] >> 4 & 0x0f0f0f0f) | (words[0] & 0x0f0f0f0f) << 4;
        C::template numbers<N>(words, v);

        float first = float_of(table[0]), last = float_of(table[1]);
        if (p.block_rows == 1 && p.block_columns == 1) {
            multiply<N>(p, float_of(table[3]), float_of(table[2]), last, v);
            return;
        }
        if (by_strips(p)) {
            u32 strip = p.strip.quotient(element), within = element - strip * p.strip.divisor, index = strip - table[4];
            if (within + N <= p.strip.divisor) {
                multiply<N>(p, float_of(table[ZERO_POINTS + index]), float_of(table[SCALES + index]), last, v);
                return;
            }
        }
        // The end of a block or row lies among these: each looks for its own.
        for (u32 i = 0; i < N; ++i) {
            if (element + i >= p.run.end) return;
            u32 mine = p.columns.quotient(element + i), beside = element + i - mine * p.columns.divisor;
            u32 below = p.height.quotient(p.row + mine);
            u64 block = place_beside(p.order, p.block_rows, p.block_columns, below, p.width.quotient(beside));
            if (p.zero_point) v[i] = v[i] - number_beside(p.zero_point, p.zero_kind, block);
            if (p.scale) v[i] = v[i] * whole(p, number_beside(p.scale, p.scale_kind, block), first) * last;
        }
    }
};

// NVFP4 as it mostly is: 16 numbers share a scale of E4M3, and scales come by fours. There is nothing to look for then.
template <bool HIGH> struct Nvfp4 {
    // Scales lie in a ring that holds those of two tiles, so that an element tells where its own is.
    static constexpr u32 ELEMENTS = 2, BYTES = 1, STRIP = 16, RING = 2 * THREADS * 8 * ROUNDS / STRIP, ENTRIES = RING + 4;

    STATIC void prepare(const Scaled& p, u32* table) {
        if (threadIdx.x == 0 && has_last(p)) table[RING] = bits_of(last_of(p));
    }

    STATIC void enter(const Scaled& p, u32* table, u32 begin, u32 count) {
        u32 end = begin + count < p.run.end ? begin + count : p.run.end;
        u32 first = begin / (4 * STRIP), last = (end - 1) / (4 * STRIP);
        for (u32 i = first + threadIdx.x; i <= last; i += THREADS) {
            u32 bytes = four_scales(p, i * 4 * STRIP), scales[4];
            float factor = common(p);
#pragma unroll
            for (u32 j = 0; j < 4; ++j) scales[j] = bits_of(whole(p, e4m3_above(bytes << (24 - 8 * j)), factor));
            *(Vector*)(table + i * 4 % RING) = {scales[0], scales[1], scales[2], scales[3]};
        }
    }

    template <u32 N>
    STATIC void decode(const Scaled& p, const u32* table, Bytes tile, u32 place, u32 element, float (&v)[N]) {
        u32 words[1];
        tile.template take<4>(place / 2, words);
        E2m1::in_order<HIGH>(words[0], v);
        float scale = float_of(table[element / STRIP % RING]);
        for (u32 i = 0; i < N; ++i) v[i] = v[i] * scale;
        if (has_last(p)) {
            float last = float_of(table[RING]);
            for (u32 i = 0; i < N; ++i) v[i] = v[i] * last;
        }
    }
};

FLAT(scaled_e4m3, Scaled, Packed<E4m3>)
FLAT(scaled_e5m2, Scaled, Packed<E5m2>)
FLAT(scaled_int8, Scaled, Packed<Int8>)
FLAT(scaled_e2m1, Scaled, Packed<E2m1>)
FLAT(nvfp4_high, Scaled, Nvfp4<true>)
FLAT(nvfp4_low, Scaled, Nvfp4<false>)
