// What GPTQ, AWQ for its GEMM and the integers of compressed-tensors share: unsigned numbers in words, less the zero point of their group
// and times its scale.
#pragma once
#include "numbers.cuh"

struct PackedInt {
    u64 data;
    u64 out;    // where row `first` begins
    u64 scale;
    u64 zero;   // words; 0: the zero point is half of what numbers can be
    u64 index;  // the group of each column; 0: groups follow each other
    u64 row_tiles;  // the first row of tiles
    u32 rows;
    u32 columns;
    u32 first;  // the first row that is wanted
    u32 end;    // the row behind the last
    u32 groups;
    u32 tiles;  // tiles to decode
    u32 row_words;     // words that numbers of all rows fill, and of all columns
    u32 column_words;
    Divider across;  // tiles beside each other
    Divider group;   // columns of a group
    u32 scale_kind;
    u32 more;  // what is added to zero points
    u32 each;  // tiles beside each other that a block takes: then `tiles` and `across` count blocks
    u32 unused;
};

// The group of a column.
DEVICE u32 group_of(const PackedInt& p, u32 column) {
    return p.index ? load((const u32*)p.index + column) : p.group.quotient(column);
}

// What the numbers of a group have in common: 2^23 and the zero point, and the scale.
struct Range {
    float less, scale;
};

// Where a row's first group has its zero point and its scale, and how many bytes behind are those of the next group.
struct Row {
    u64 zero, scale;
    u64 rest;  // of a zero point that goes on in another word
    u32 zero_step, scale_step;
    u32 bit;
};

// Those of all rows lie together, a group after the other. `word` is the row's among those of zero points.
DEVICE Row row_of_groups(const PackedInt& p, u32 row, u32 word, u32 bit) {
    u32 size = p.scale_kind == F32 ? 4 : 2;
    u64 zero = p.zero + (u64)word * 4;
    return {zero, p.scale + (u64)row * size, zero + 4, p.row_words * 4, p.rows * size, bit};
}
// Those of all groups lie together, a row after the other.
DEVICE Row row_of_rows(const PackedInt& p, u32 row, u32 word, u32 bit) {
    u32 size = p.scale_kind == F32 ? 4 : 2;
    u64 zero = p.zero + (u64)word * p.groups * 4;
    return {zero, p.scale + (u64)row * p.groups * size, zero + (u64)p.groups * 4, 4, size, bit};
}

// The zero point of a group of a row, which there is.
template <u32 BITS> DEVICE u32 zero_of(const PackedInt& p, const Row& row, u32 group) {
    if (!p.zero) return (1u << (BITS - 1)) + p.more;
    u64 step = (u64)group * row.zero_step;
    u32 code = load((const u32*)(row.zero + step)) >> row.bit;
    if (BITS == 3 && row.bit > 29) code |= load((const u32*)(row.rest + step)) << (32 - row.bit);
    return (code & ((1u << BITS) - 1)) + p.more;
}
// What the numbers of a group of a row have in common; nothing is a number of a group that there is not.
template <u32 BITS> DEVICE Range range_of(const PackedInt& p, const Row& row, u32 group) {
    bool known = group < p.groups;
    group = known ? group : 0;
    float scale = float_at(row.scale + (u64)group * row.scale_step, p.scale_kind, 0);
    return {float_of(zero_of<BITS>(p, row, group) | INTEGER), known ? scale : float_of(0x7fffffff)};
}
