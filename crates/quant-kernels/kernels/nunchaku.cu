// The formats of Nunchaku: numbers of 4 bits in the order in which its kernels read them. A block decodes one tile: of SVDQ 64 rows ×
// 64 columns, which are 2048 bytes that follow each other; of AWQ 4 rows × 512 columns.
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

// Rows of a tile that a thread decodes, and their distance: 32 threads lie below each other, 8 beside each other.
constexpr u32 EACH = 2, BELOW = THREADS / 8, ROWS = EACH * BELOW;
// Ranks that are multiplied for one filling of shared memory.
constexpr u32 STEP = 16;

// The numbers of the packed part alone, in f64: eight neighbours.
DEVICE void packed_part(const Nunchaku& p, u32 row, u32 column, const double* smooth, double* sums) {
    u32 pack = row % 128 / 16, high = row % 16 / 8, lane = row % 8;
    u32 half = column % 64 / 32, quarter = column % 32 / 8;
    u64 tile = (u64)(row / 128) * (p.columns / 64) + column / 64;
    u64 place = (((tile * 8 + pack) * 8 + lane) * 4 + quarter) * 4 + high * 2 + half;
    u32 codes = load((const u32*)p.data + place);
    u64 index = p.fp4 ? small_scale_place(p.columns / 16, row, column / 16)
                      : scale_place(p.columns / 64, row, column / 64);
    double scale = (double)number_at(p.scale, p.scale_kind, index), factor = 1.0;
    if (p.row_scale) factor = (double)number_at(p.row_scale, p.row_scale_kind, scale_place(1, row, 0));
    if (p.global) factor = factor * (double)number_at(p.global, p.global_kind, 0);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        u32 code = codes >> 4 * i & 15;
        // The sign of an integer is its highest bit.
        float number = p.fp4 ? e2m1(code) : integer(code ^ 8) - 8.0f;
        sums[i] = (double)number * scale * factor / smooth[i];
    }
}

template <class T> DEVICE void svdq(const Nunchaku& p) {
    SHARED(double, smooth, 64);
    SHARED(double, down, STEP * 64);
    SHARED(float, up, ROWS * STEP);
    LOCAL(double, sums, EACH * 8);
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        u32 below = p.across.quotient(tile), column = (tile - below * p.across.divisor) * 64;
        u32 row = ((u32)p.row_tiles + below) * ROWS;
        EACH_THREAD {
            if (threadIdx.x < 64) {
                u64 place = scale_place(1, column + threadIdx.x, 0);
                smooth[threadIdx.x] = (double)number_at(p.smooth, p.smooth_kind, place);
            }
        }
        BARRIER();
        EACH_THREAD {
            u32 beside = threadIdx.x % 8 * 8;
#pragma unroll
            for (u32 j = 0; j < EACH; ++j) {
                packed_part(p, row + threadIdx.x / 8 + BELOW * j, column + beside, smooth + beside, MINE(sums) + 8 * j);
            }
        }
        for (u32 rank = 0; rank < p.rank; rank += STEP) {
            EACH_THREAD {
                for (u32 i = threadIdx.x; i < STEP * 64; i += THREADS) {
                    u32 across = rank + i / 64, along = column + i % 64;
                    u64 place = low_rank_place((u64)(along / 16) * (p.rank / 16) + across / 16, across, along);
                    down[i] = (double)number_at(p.down, p.down_kind, place);
                }
                for (u32 i = threadIdx.x; i < ROWS * STEP; i += THREADS) {
                    u32 across = row + i / STEP, along = rank + i % STEP;
                    u64 place = low_rank_place((u64)(across / 16) * (p.rank / 16) + along / 16, across, along);
                    up[i] = number_at(p.up, p.up_kind, place);
                }
            }
            BARRIER();
            EACH_THREAD {
                u32 beside = threadIdx.x % 8 * 8;
                for (u32 k = 0; k < STEP; ++k) {
#pragma unroll
                    for (u32 j = 0; j < EACH; ++j) {
                        double factor = (double)up[(threadIdx.x / 8 + BELOW * j) * STEP + k];
#pragma unroll
                        for (u32 i = 0; i < 8; ++i) {
                            double& sum = MINE(sums)[8 * j + i];
                            // Both numbers have 24 bits at most, so that their product is exact.
                            sum = multiply_add(factor, down[k * 64 + beside + i], sum);
                        }
                    }
                }
            }
            BARRIER();
        }
        EACH_THREAD {
#pragma unroll
            for (u32 j = 0; j < EACH; ++j) {
                u32 mine = row + threadIdx.x / 8 + BELOW * j;
                if (mine >= p.first && mine < p.end) {
                    float v[8];
                    for (u32 i = 0; i < 8; ++i) v[i] = (float)MINE(sums)[8 * j + i];
                    store_eight<T>(p, mine, column + threadIdx.x % 8 * 8, v);
                }
            }
        }
        BARRIER();
    }
}

// Unsigned numbers times the scale of their 64 columns, plus its shift. Four rows are packed together; of 32 columns, those 8 apart
// share two bytes, so that 16 bytes hold four times eight neighbours.
template <class T> DEVICE void awq(const Nunchaku& p) {
    // A tile is one row of four below each other and 512 columns.
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        u32 below = p.across.quotient(tile), beside = tile - below * p.across.divisor;
        EACH_THREAD {
            u32 row = ((u32)p.row_tiles + below) * 4 + threadIdx.x / 64, column = beside * 512 + threadIdx.x % 64 * 8;
            if (column < p.columns && row >= p.first && row < p.end) {
                u64 place = ((u64)(row / 4) * (p.columns / 64) + column / 64) * 4 + row % 4;
                Vector words = load_vector((const void*)(p.data + place * 32 + column % 64 / 32 * 16));
                u64 group = (u64)(column / 64) * p.rows + row;
                float scale = number_at(p.scale, p.scale_kind, group), shift = number_at(p.shift, p.shift_kind, group);
                u32 pairs[4] = {words.x, words.y, words.z, words.w}, bit = column % 32 / 8 * 4;
                float v[8];
                for (u32 i = 0; i < 8; ++i) {
                    v[i] = integer(pairs[i / 2] >> (bit + i % 2 * 16) & 15) * scale + shift;
                }
                store_eight<T>(p, row, column, v);
            }
        }
    }
}

KERNEL(svdq_f32, Nunchaku, svdq<Float>)
KERNEL(svdq_bf16, Nunchaku, svdq<Brain>)
KERNEL(svdq_f16, Nunchaku, svdq<Half>)
KERNEL(awq_f32, Nunchaku, awq<Float>)
KERNEL(awq_bf16, Nunchaku, awq<Brain>)
KERNEL(awq_f16, Nunchaku, awq<Half>)
