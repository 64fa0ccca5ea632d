// device.cuh for a C++ compiler: kernels that run on a CPU, a block after the other and a phase over all its threads. It is how
// tests run every kernel where there is no GPU; the numbers are the same because the operations are.
#pragma once
#include <cmath>
#include <cstring>

struct Dimension {
    u32 x;
};
static thread_local Dimension threadIdx, blockIdx, gridDim;

#define DEVICE static inline
#define MEMBER inline
#define STATIC static inline
#define RARE static inline
#define TABLE static const
#define EACH_THREAD for (threadIdx.x = 0; threadIdx.x < THREADS; ++threadIdx.x)
#define BARRIER() ((void)0)
#define SHARED(type, name, count) alignas(16) static thread_local type name[count]
#define LOCAL(type, name, count) static thread_local type name[THREADS][count]
#define MINE(name) name[threadIdx.x]
#define KERNEL(NAME, PARAMS, ...)                                                                                              \
    extern "C" void NAME(u32 blocks, const void* bytes) {                                                                      \
        PARAMS params;                                                                                                         \
        memcpy(&params, bytes, sizeof params);                                                                                 \
        gridDim.x = blocks;                                                                                                    \
        for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) __VA_ARGS__(params);                                           \
    }

DEVICE float float_of(u32 bits) {
    float number;
    memcpy(&number, &bits, 4);
    return number;
}
DEVICE u32 bits_of(float number) {
    u32 bits;
    memcpy(&bits, &number, 4);
    return bits;
}
DEVICE u32 choose(u32 low, u32 high, u32 nibbles) {
    u64 bytes = (u64)high << 32 | low;
    u32 chosen = 0;
    for (u32 i = 0; i < 4; ++i) chosen |= (u32)(bytes >> 8 * (nibbles >> 4 * i & 7) & 255) << 8 * i;
    return chosen;
}
DEVICE u32 shifted(u32 low, u32 high, u32 bits) { return (u32)(((u64)high << 32 | low) >> (bits & 31)); }
DEVICE u32 count_ones(u32 bits) { return (u32)__builtin_popcount(bits); }
// The kernels that use it multiply numbers whose products are exact, so that one rounding is all there is.
DEVICE double multiply_add(double a, double b, double sum) { return a * b + sum; }
DEVICE float to_even(float number) { return rintf(number); }

DEVICE float from_half(u32 bits) {
    u32 sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
    // Read as an f32 a half is smaller by 2^112, subnormal or not; infinities and NaN get the exponent of an f32.
    if (rest >= 0x7c00u << 13) return float_of(sign | rest | 0x7f800000);
    return float_of(sign | bits_of(float_of(rest) * float_of((127 + 112) << 23)));
}
DEVICE u32 to_half(float number) {
    u32 bits = bits_of(number), sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return sign | 0x7fff;
    // From 65520 on everything is infinity.
    if (bits >= 0x477ff000) return sign | 0x7c00;
    if (bits >= 0x38800000) {
        bits -= 112u << 23;
        return sign | (bits + 0xfff + (bits >> 13 & 1)) >> 13;
    }
    // Subnormal: added to 0.5, the low bits of the sum are multiples of 2^-24, rounded to even.
    return sign | (bits_of(float_of(bits) + 0.5f) - bits_of(0.5f));
}

struct Vector {
    u32 x, y, z, w;
};
// What a GPU cannot reach at such an address ends the process here too.
DEVICE void must_be_multiple(const void* address, u32 size) {
    if ((u64)address % size != 0) __builtin_trap();
}
DEVICE Vector load_vector(const void* address) {
    must_be_multiple(address, 16);
    Vector v;
    memcpy(&v, address, 16);
    return v;
}
DEVICE void store_vector(void* address, Vector v) {
    must_be_multiple(address, 16);
    memcpy(address, &v, 16);
}
DEVICE Vector read_vector(const void* address) { return load_vector(address); }
template <class T> DEVICE T load(const T* address) {
    must_be_multiple(address, sizeof(T));
    return *address;
}
