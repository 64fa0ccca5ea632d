// AWQ for its GEMM: a word holds eight rows of a column, those of the next rows lie beside it.
//
//   words  ── 16 bytes a thread ──▶  shared memory  ── eight columns of a word a thread ──▶  eight rows of eight numbers
//
// Neighbouring threads read neighbouring words, then write neighbouring columns.
#include "packed_int.cuh"

// Columns of a tile, and its words beside each other; the rows of a word, and columns that a thread decodes.
constexpr u32 COLUMNS = 128, WORDS = 16, EIGHT = 8;

// Where shared memory has a word of a column, so that columns 8 apart, which threads read, are in other banks.
DEVICE u32 place_of(u32 column, u32 word) {
    return column % EIGHT * (COLUMNS / EIGHT * (WORDS + 1) + 1) + column / EIGHT * (WORDS + 1) + word;
}
// Where in a word the number of a row begins.
DEVICE u32 bit_of(u32 row) { return row % 2 * 16 + row % 8 / 2 * 4; }

// What the numbers of a group of a row have in common.
DEVICE Range range_at(const PackedInt& p, u32 row, u32 group) {
    return range_of<4>(p, row_of_groups(p, row, row / EIGHT, bit_of(row)), group);
}
// A row's number in a word, less its zero point and times its scale. The subtraction is exact.
DEVICE float number_of(u32 word, u32 row, Range range) {
    return (float_of((word >> bit_of(row) & 15) | INTEGER) - range.less) * range.scale;
}

// Eight rows of eight columns that share a group, each written as vectors.
template <class T> DEVICE void decode(const PackedInt& p, u32 row, u32 column, u64 out, const u32* codes) {
    u32 group = group_of(p, column);
#pragma unroll
    for (u32 below = 0; below < EIGHT; ++below) {
        if (row + below < p.first || row + below >= p.end) continue;
        Range range = range_at(p, row + below, group);
        float v[EIGHT];
#pragma unroll
        for (u32 i = 0; i < EIGHT; ++i) v[i] = number_of(codes[i], below, range);
        u64 address = out + (u64)(row + below - p.first) * p.columns * T::SIZE;
#pragma unroll
        for (u32 i = 0; i < EIGHT; i += WIDE<T>) T::wide(address + i * T::SIZE, v + i);
    }
}
// Eight rows of so many columns, one by one.
template <class T> DEVICE void decode_apart(const PackedInt& p, u32 row, u32 column, u64 out, const u32* codes, u32 count) {
#pragma unroll 1
    for (u32 below = 0; below < EIGHT; ++below) {
        if (row + below < p.first || row + below >= p.end) continue;
        u64 address = out + (u64)(row + below - p.first) * p.columns * T::SIZE;
#pragma unroll
        for (u32 i = 0; i < EIGHT; ++i) {
            if (i >= count) continue;
            Range range = range_at(p, row + below, group_of(p, column + i));
            T::one(address + i * T::SIZE, number_of(codes[i], below, range));
        }
    }
}

template <class T> DEVICE void by_columns(const PackedInt& p) {
    SHARED(u32, stage, EIGHT * (COLUMNS / EIGHT * (WORDS + 1) + 1));
    bool vectors = p.data % 16 == 0 && p.row_words % 4 == 0;
    // Whether eight columns share a group, and begin at a multiple of 16 bytes in every row.
    bool whole = p.index == 0 && p.group.divisor % EIGHT == 0 && p.out % 16 == 0 && p.columns % EIGHT == 0;
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        u32 below = p.across.quotient(tile), column = (tile - below * p.across.divisor) * COLUMNS;
        u32 word = ((u32)p.row_tiles + below) * WORDS;
        EACH_THREAD {
            constexpr u32 LOADS = WORDS * COLUMNS / 4 / THREADS;
            Vector loaded[LOADS];
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                u32 place = threadIdx.x + i * THREADS, at = column + place / 4, first = word + place % 4 * 4;
                const u32* from = (const u32*)p.data + (u64)at * p.row_words + first;
                if (at >= p.columns || first >= p.row_words) continue;
                if (vectors) {
                    loaded[i] = load_vector(from);
                } else {
                    u32 left = p.row_words - first;
                    loaded[i] = {load(from), left > 1 ? load(from + 1) : 0, left > 2 ? load(from + 2) : 0,
                                 left > 3 ? load(from + 3) : 0};
                }
            }
#pragma unroll
            for (u32 i = 0; i < LOADS; ++i) {
                u32 place = threadIdx.x + i * THREADS, to = place_of(place / 4, place % 4 * 4);
                if (column + place / 4 >= p.columns || word + place % 4 * 4 >= p.row_words) continue;
                stage[to] = loaded[i].x, stage[to + 1] = loaded[i].y;
                stage[to + 2] = loaded[i].z, stage[to + 3] = loaded[i].w;
            }
        }
        BARRIER();
        EACH_THREAD {
            u32 beside = threadIdx.x % (COLUMNS / EIGHT) * EIGHT, mine = column + beside;
            u32 own = threadIdx.x / (COLUMNS / EIGHT), row = (word + own) * EIGHT;
            if (mine < p.columns && word + own < p.row_words && row + EIGHT > p.first && row < p.end) {
                u32 codes[EIGHT], left = p.columns - mine;
#pragma unroll
                for (u32 i = 0; i < EIGHT; ++i) codes[i] = stage[place_of(beside + i, own)];
                u64 out = p.out + (u64)mine * T::SIZE;
                if (whole && left >= EIGHT) {
                    decode<T>(p, row, mine, out, codes);
                } else {
                    decode_apart<T>(p, row, mine, out, codes, left < EIGHT ? left : EIGHT);
                }
            }
        }
        BARRIER();
    }
}

KERNEL(awq_gemm_f32, PackedInt, by_columns<Float>)
KERNEL(awq_gemm_bf16, PackedInt, by_columns<Brain>)
KERNEL(awq_gemm_f16, PackedInt, by_columns<Half>)
