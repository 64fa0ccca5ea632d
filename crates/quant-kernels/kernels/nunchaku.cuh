// What the kernels of Nunchaku's formats share: their struct, and where numbers lie in the order of matrix instructions.
#pragma once
#include "numbers.cuh"

struct Nunchaku {
    u64 data;
    u64 out;        // where row `first` begins
    u64 scale;
    u64 shift;      // AWQ
    u64 smooth;     // SVDQ: by column
    u64 row_scale;  // by row; 0: there is none
    u64 global;     // 0: there is none
    u64 up;
    u64 down;
    u64 row_tiles;  // the first row of tiles
    u32 rows;
    u32 columns;
    u32 first;      // the first row that is wanted
    u32 end;        // the row behind the last
    u32 rank;
    u32 tiles;      // tiles to decode
    Divider across; // tiles beside each other
    u32 scale_kind;
    u32 shift_kind;
    u32 smooth_kind;
    u32 row_scale_kind;
    u32 global_kind;
    u32 up_kind;
    u32 down_kind;
    u32 fp4;
};

// Eight neighbours of a row, or as many as are 16 bytes.
template <class T> DEVICE void store_eight(const Nunchaku& p, u32 row, u32 column, const float* v) {
    u64 address = p.out + ((u64)(row - p.first) * p.columns + column) * T::SIZE;
    if (address % 16 == 0) {
        for (u32 i = 0; i < 8; i += WIDE<T>) T::wide(address + i * T::SIZE, v + i);
    } else {
        for (u32 i = 0; i < 8; ++i) T::one(address + i * T::SIZE, v[i]);
    }
}

// A scale of 16 bits: for each 128 rows all groups, in them 16 rows, in the order 0 1 8 9 2 3 10 11 …
DEVICE u64 scale_place(u32 groups, u32 row, u32 group) {
    u32 within = row % 16, lane = within % 8 / 2 * 4 + within / 8 * 2 + within % 2;
    return (((u64)(row / 128) * groups + group) * 8 + row % 128 / 16) * 16 + lane;
}
// A scale of 8 bits: for each 128 rows four groups at a time, in them row after row of eight, 8 and 32 apart.
DEVICE u64 small_scale_place(u32 groups, u32 row, u32 group) {
    u32 third = row % 128 / 32, second = row % 32 / 8, first = row % 8;
    u64 tile = (u64)(row / 128) * (groups / 4) + group / 4;
    return ((tile * 8 + first) * 4 + second) * 16 + third * 4 + group % 4;
}
// An element of a narrow matrix, in tiles of 16 × 16.
DEVICE u64 low_rank_place(u64 tile, u32 across, u32 along) {
    u32 high = across % 16 / 8, lane = across % 8;
    u32 half = along % 16 / 8, quarter = along % 8 / 2, part = along % 2;
    return (((tile * 8 + lane) * 4 + quarter) * 2 + high) * 4 + half * 2 + part;
}
