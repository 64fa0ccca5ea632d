// The frame of numbers whose words hold columns of one row, 2, 3, 4 or 8 bits each.
//
//   words  ── 32 columns of a row a thread ──▶  numbers in shared memory, by rows  ── 16 bytes a thread ──▶  rows
//
// Neighbouring threads read neighbouring words, then write neighbouring columns. 32 numbers fill whole words in any number of bits, and
// share a group in most files, also where each column names its group: that is looked at. Where they do not, the scales and zero points of
// all groups are brought into shared memory, once for some tiles beside each other.
#pragma once
#include "packed_int.cuh"

// Rows and columns of a tile, the columns that a thread reads, and threads that read a row.
constexpr u32 ROWS = 32, COLUMNS = 256, UNIT = 32, UNITS = COLUMNS / UNIT;
// Groups that shared memory has room for: those of 12288 columns by 128.
constexpr u32 MOST_GROUPS = 96;

// A layout L says which row of a tile and which 32 columns a thread reads, reads their words, and where a row's zero points and scales are.

// How a thread's numbers find what they are multiplied with: in one group, in a table, or one by one.
enum Groups { ONE, TABLED, APART };

// A group of a row in the table: the bits of a scale of 16, and above them the zero point. The last group is the one that there is not.
template <class L, u32 BITS> DEVICE void fill(const PackedInt& p, u32 top, u32* table) {
#pragma unroll 2
    for (u32 place = threadIdx.x; place < (p.groups + 1) * ROWS; place += THREADS) {
        u32 group = place / ROWS, row = top + place % ROWS, entry = 0x7fff;
        if (row >= p.rows) continue;
        if (group < p.groups) {
            Row found = L::template place<BITS>(p, row);
            entry = load((const u16*)(found.scale + (u64)group * found.scale_step));
            entry |= zero_of<BITS>(p, found, group) << 16;
        }
        table[place] = entry;
    }
}
DEVICE Range range_in(u32 entry, u32 kind) {
    float scale = kind == F16 ? from_half(entry & 0xffff) : float_of(entry << 16);
    return {float_of(choose(entry, INTEGER, 0x7432)), scale};
}

// Where a row in shared memory has a thread's vector. Threads beside each other write to other banks.
template <u32 EACH> DEVICE u32 place_of(u32 unit, u32 vector) { return unit * EACH + (vector + unit * EACH / 8) % EACH; }

// One of the first eight numbers in words, and 2^23.
template <u32 BITS> DEVICE float number_above(const u32* words, u32 index) {
    if (BITS == 3) return float_of((words[0] >> 3 * index & 7) | INTEGER);
    // A byte of the word, of which all but one number are masked off.
    constexpr u32 EACH = 8 / BITS, MASK = 0xff >> (8 - BITS);
    u32 word = words[index / (32 / BITS)] >> index % EACH * BITS & MASK * 0x01010101;
    return byte_above(word, index % (32 / BITS) / EACH);
}

// Moves so many numbers out of words.
template <u32 BITS, u32 COUNT> DEVICE void drop(u32* words) {
    constexpr u32 WHOLE = COUNT * BITS / 32, PART = COUNT * BITS % 32;
#pragma unroll
    for (u32 i = 0; i < BITS; ++i) {
        u32 low = i + WHOLE < BITS ? words[i + WHOLE] : 0, high = i + WHOLE + 1 < BITS ? words[i + WHOLE + 1] : 0;
        words[i] = shifted(low, high, PART);
    }
}

// The numbers of a thread's words as vectors of the target's type; subtractions are exact.
template <u32 BITS, class T, Groups IN>
DEVICE void decode(const PackedInt& p, const Row& row, const u32* groups, const u32* table, Range range, u32 unit, u32* words, Vector* out) {
    constexpr u32 N = WIDE<T>, UNROLLED = IN == ONE ? UNIT / N : 1;
#pragma unroll UNROLLED
    for (u32 chunk = 0; chunk < UNIT / N; ++chunk) {
        float v[N];
#pragma unroll
        for (u32 i = 0; i < N; ++i) {
            if (IN == TABLED) range = range_in(table[groups[chunk * N + i]], p.scale_kind);
            if (IN == APART) range = range_of<BITS>(p, row, groups[chunk * N + i] / ROWS);
            v[i] = (number_above<BITS>(words, i) - range.less) * range.scale;
        }
        store_vector(out + place_of<UNIT / N>(unit, chunk), T::packed(v));
        drop<BITS, N>(words);
    }
}

// Writes a vector of numbers from each of a tile's rows that are STEP apart, the first of them `row` behind the first that is wanted.
template <class T, u32 STEP> DEVICE void write(const PackedInt& p, u32 column, u32 row, const Vector* from, u32 pitch) {
    u64 step = (u64)STEP * p.columns * T::SIZE;
    u64 address = p.out + ((u64)(long long)(int)row * p.columns + column) * T::SIZE;
    // A step is a multiple of 16.
    bool wide = address % 16 == 0 && column + WIDE<T> <= p.columns;
#pragma unroll
    for (u32 i = 0; i < ROWS / STEP; ++i) {
        if (row + i * STEP < p.end - p.first) {
            if (wide) {
                store_vector((void*)address, read_vector(from + i * pitch));
            } else {
                using Stored = typename T::Stored;
#pragma unroll 1
                for (u32 at = 0; at < WIDE<T> && column + at < p.columns; ++at) {
                    ((Stored*)address)[at] = ((const Stored*)(from + i * pitch))[at];
                }
            }
        }
        address += step;
    }
}

template <class L, u32 BITS, class T> DEVICE void by_rows(const PackedInt& p) {
    // Vectors of a row, and one of room, so that threads with rows below each other do not wait for each other.
    constexpr u32 N = WIDE<T>, ACROSS = COLUMNS / N, PITCH = ACROSS + 1;
    SHARED(Vector, stage, ROWS * PITCH);
    SHARED(u32, table, (MOST_GROUPS + 1) * ROWS);
    // Where the table has the group of each column.
    SHARED(u32, groups, COLUMNS);
    // Whether 32 columns are in several groups.
    SHARED(u32, mixed, UNITS);
    LOCAL(u32, words, BITS);
    LOCAL(Range, range, 1);
    bool looked = p.index != 0 || p.group.divisor % UNIT != 0;
    bool tabled = p.groups <= MOST_GROUPS && p.scale_kind != F32;
    EACH_THREAD {
        if (threadIdx.x < UNITS) mixed[threadIdx.x] = 0;
    }
    BARRIER();
    for (u32 strip = blockIdx.x; strip < p.tiles; strip += gridDim.x) {
        u32 below = p.across.quotient(strip), tile = (strip - below * p.across.divisor) * p.each;
        u32 top = ((u32)p.row_tiles + below) * ROWS, behind = (tile + p.each) * COLUMNS;
        bool filled = false;
        for (u32 column = tile * COLUMNS; column < behind && column < p.columns; column += COLUMNS) {
            EACH_THREAD {
                u32 row = top + L::row(threadIdx.x), mine = column + L::unit(threadIdx.x) * UNIT;
                if (row >= p.first && row < p.end && mine < p.columns) {
                    L::template words<BITS>(p, row, mine / UNIT * BITS, MINE(words));
                    // Asked for with the words, so that memory is waited for once.
                    MINE(range)[0] = range_of<BITS>(p, L::template place<BITS>(p, row), group_of(p, mine));
                }
                if (looked) {
                    u32 at = column + threadIdx.x, start = at - threadIdx.x % UNIT, last = p.columns - 1;
                    u32 own = group_of(p, at < last ? at : last), first = group_of(p, start < last ? start : last);
                    groups[threadIdx.x] = (own < p.groups ? own : p.groups) * ROWS;
                    if (own != first) mixed[threadIdx.x / UNIT] = 1;
                }
            }
            BARRIER();
            u32 several = 0;
            for (u32 unit = 0; unit < UNITS; ++unit) several |= mixed[unit];
            if (several && tabled && !filled) {
                EACH_THREAD { fill<L, BITS>(p, top, table); }
                BARRIER();
                filled = true;
            }
            EACH_THREAD {
                u32 beside = L::row(threadIdx.x), row = top + beside, unit = L::unit(threadIdx.x);
                if (row >= p.first && row < p.end && column + unit * UNIT < p.columns) {
                    Vector* out = stage + beside * PITCH;
                    const u32* own = groups + unit * UNIT;
                    if (!mixed[unit]) {
                        decode<BITS, T, ONE>(p, {}, own, table, MINE(range)[0], unit, MINE(words), out);
                    } else if (tabled) {
                        decode<BITS, T, TABLED>(p, {}, own, table + beside, {}, unit, MINE(words), out);
                    } else {
                        Row place = L::template place<BITS>(p, row);
                        decode<BITS, T, APART>(p, place, own, table, {}, unit, MINE(words), out);
                    }
                }
            }
            BARRIER();
            EACH_THREAD {
                if (threadIdx.x < UNITS) mixed[threadIdx.x] = 0;
                // A thread has one column of vectors, some rows apart. Rows before the first are below zero, and not written.
                constexpr u32 STEP = THREADS / ACROSS, EACH = UNIT / N;
                u32 beside = threadIdx.x % ACROSS, mine = column + beside * N, row = threadIdx.x / ACROSS;
                const Vector* from = stage + row * PITCH + place_of<EACH>(beside / EACH, beside % EACH);
                if (mine < p.columns) write<T, STEP>(p, mine, top + row - p.first, from, STEP * PITCH);
            }
            BARRIER();
        }
    }
}

// The kernels of a layout and a number of bits, one a type of target.
#define BY_ROWS(NAME, LAYOUT, BITS)                                                                                            \
    KERNEL(NAME##_f32, PackedInt, by_rows<LAYOUT, BITS, Float>)                                                                \
    KERNEL(NAME##_bf16, PackedInt, by_rows<LAYOUT, BITS, Brain>)                                                               \
    KERNEL(NAME##_f16, PackedInt, by_rows<LAYOUT, BITS, Half>)
