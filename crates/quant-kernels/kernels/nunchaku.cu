// The formats of Nunchaku: numbers of 4 bits in the order in which its kernels read them. A block decodes one tile: of SVDQ 128 rows ×
// 64 columns, here as the decoder does, in f64 (nunchaku_matrix.cu is faster, and not as exact); of AWQ 512 columns of a few rows.
#include "nunchaku.cuh"

// Rows and columns of a part of a tile, which shared memory holds. A thread decodes EACH rows of them, 8 columns each: 32 threads lie
// below each other, 8 beside each other.
constexpr u32 PART = 64, EACH = 2, BELOW = THREADS / 8;
// Ranks that are multiplied for one filling of shared memory.
constexpr u32 STEP = 16;

// Where a column's number of one rank lies in shared memory: those that threads beside each other read at once follow each other.
DEVICE u32 down_place(u32 column) { return column % 8 / 2 * 16 + column / 8 * 2 + column % 2; }

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

// A part of a tile.
template <class T> DEVICE void svdq_part(const Nunchaku& p, u32 row, u32 column) {
    SHARED(double, smooth, PART);
    SHARED(double, down, STEP * PART);
    SHARED(double, up, STEP * PART);
    LOCAL(double, sums, EACH * 8);
    EACH_THREAD {
        if (threadIdx.x < PART) {
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
            for (u32 i = threadIdx.x; i < STEP * PART; i += THREADS) {
                u32 across = rank + i / PART, along = column + i % PART;
                u64 place = low_rank_place((u64)(along / 16) * (p.rank / 16) + across / 16, across, along);
                down[i / PART * PART + down_place(i % PART)] = (double)number_at(p.down, p.down_kind, place);
                across = row + i % PART, along = rank + i / PART;
                place = low_rank_place((u64)(across / 16) * (p.rank / 16) + along / 16, across, along);
                up[i] = (double)number_at(p.up, p.up_kind, place);
            }
        }
        BARRIER();
        EACH_THREAD {
            const double* beside = down + threadIdx.x % 8 * 2;
            for (u32 k = 0; k < STEP; ++k) {
#pragma unroll
                for (u32 j = 0; j < EACH; ++j) {
                    double factor = up[k * PART + threadIdx.x / 8 + BELOW * j];
#pragma unroll
                    for (u32 i = 0; i < 8; ++i) {
                        double& sum = MINE(sums)[8 * j + i];
                        // Both numbers have 24 bits at most, so that their product is exact.
                        sum = multiply_add(factor, beside[k * PART + i / 2 * 16 + i % 2], sum);
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

template <class T> DEVICE void svdq(const Nunchaku& p) {
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        u32 below = p.across.quotient(tile), column = (tile - below * p.across.divisor) * PART;
        u32 row = ((u32)p.row_tiles + below) * 128;
#pragma unroll 1
        for (u32 begin = row; begin < row + 128; begin += PART) {
            if (begin < p.end && begin + PART > p.first) svdq_part<T>(p, begin, column);
        }
    }
}

// The numbers of four rows, which follow each other in memory: 8 bytes at once, if they are of 16 bits.
DEVICE void four_numbers(u64 address, u32 kind, u64 index, float (&v)[4]) {
    if ((kind == BF16 || kind == F16) && address % 8 == 0) {
        u64 both = load((const u64*)(address + index * 2));
        u32 words[2] = {(u32)both, (u32)(both >> 32)};
        if (kind == BF16) {
            for (u32 i = 0; i < 4; ++i) v[i] = float_of(i % 2 ? words[i / 2] & 0xffff0000 : words[i / 2] << 16);
        } else {
            for (u32 i = 0; i < 4; ++i) v[i] = from_half(i % 2 ? words[i / 2] >> 16 : words[i / 2] & 0xffff);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = number_beside(address, kind, index + i);
}

// Unsigned numbers times the scale of their 64 columns, plus its shift. Four rows are packed together; of 32 columns, those 8 apart
// share two bytes, so that 16 bytes hold four times eight neighbours.
//
// A thread decodes 16 bytes of numbers in each of the four rows, so that what it has to find is found once for all of them, and a
// warp's numbers follow each other.
template <class T> DEVICE void awq(const Nunchaku& p) {
    constexpr u32 N = WIDE<T>, BESIDE = 512 / N, FOURS = THREADS / BESIDE;
    bool wide = p.out % 16 == 0;
    for (u32 tile = blockIdx.x; tile < p.tiles; tile += gridDim.x) {
        u32 below = p.across.quotient(tile), beside = tile - below * p.across.divisor;
        EACH_THREAD {
            u32 row = (((u32)p.row_tiles + below) * FOURS + threadIdx.x / BESIDE) * 4;
            u32 column = beside * 512 + threadIdx.x % BESIDE * N;
            if (column < p.columns && row < p.end && row + 4 > p.first) {
                u64 from = p.data + ((u64)(row / 4) * (p.columns / 64) + column / 64) * 128 + column % 64 / 32 * 16;
                Vector words[4];
#pragma unroll
                for (u32 r = 0; r < 4; ++r) words[r] = load_vector((const void*)(from + r * 32));
                float scale[4], shift[4];
                u64 group = (u64)(column / 64) * p.rows + row;
                four_numbers(p.scale, p.scale_kind, group, scale);
                four_numbers(p.shift, p.shift_kind, group, shift);
                // Where numbers lie in 16 bits. A float whose last bit is worth 1 there has them as they are.
                u32 bit = column % 32 / 8 * 4, mask = 15u << bit, floor = (127 + 23 - bit) << 23;
                float less = float_of(floor);
                u64 to = p.out + (((u64)row - p.first) * p.columns + column) * T::SIZE;
#pragma unroll
                for (u32 r = 0; r < 4; ++r) {
                    u32 pairs[4] = {words[r].x, words[r].y, words[r].z, words[r].w};
                    if (N == 4 && column % 8 != 0) pairs[0] = pairs[2], pairs[1] = pairs[3];
                    float v[N];
#pragma unroll
                    for (u32 i = 0; i < N; ++i) {
                        u32 pair = i % 2 ? pairs[i / 2] >> 16 : pairs[i / 2];
                        v[i] = (float_of((pair & mask) | floor) - less) * scale[r] + shift[r];
                    }
                    if (row + r >= p.first && row + r < p.end) {
                        if (wide) {
                            T::wide(to, v);
                        } else {
#pragma unroll
                            for (u32 i = 0; i < N; ++i) T::one(to + i * T::SIZE, v[i]);
                        }
                    }
                    to += (u64)p.columns * T::SIZE;
                }
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
