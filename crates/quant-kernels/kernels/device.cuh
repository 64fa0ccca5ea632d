// What kernels are written with: types, the few instructions that C++ does not name, and threads as phases.
//
// A kernel's body is a row of phases, EACH_THREAD { … }, with BARRIER() between them. On a GPU every thread runs each phase once;
// compiled as C++ (host.h) a phase is a loop over the threads of a block. What a thread keeps from one phase to the next is
// declared with LOCAL and named with MINE; what all threads of a block share, with SHARED.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Threads of a block, in every kernel.
constexpr u32 THREADS = 256;

#ifdef __CUDACC__

#define DEVICE __device__ __forceinline__
#define MEMBER __device__ __forceinline__
#define STATIC static __device__ __forceinline__
// What is rarely called, so that there is only one of it.
#define RARE __device__ __noinline__
#define TABLE __device__ const
#define EACH_THREAD
#define BARRIER() __syncthreads()
#define SHARED(type, name, count) __shared__ __align__(16) type name[count]
#define LOCAL(type, name, count) type name[count]
#define MINE(name) name
// A kernel NAME that runs BODY on a PARAMS.
#define KERNEL(NAME, PARAMS, ...)                                                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const PARAMS params) { __VA_ARGS__(params); }

DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float number) { return __float_as_uint(number); }
// Four bytes of eight, low ones first, each chosen by a nibble.
DEVICE u32 choose(u32 low, u32 high, u32 nibbles) { return __byte_perm(low, high, nibbles); }
// The low word of a pair shifted right by 0 to 31 bits.
DEVICE u32 shifted(u32 low, u32 high, u32 bits) { return __funnelshift_r(low, high, bits); }
DEVICE u32 count_ones(u32 bits) { return __popc(bits); }
DEVICE double multiply_add(double a, double b, double sum) { return __fma_rn(a, b, sum); }
DEVICE float to_even(float number) { return rintf(number); }

DEVICE float from_half(u32 bits) {
    float number;
    asm("{ .reg .b16 half; cvt.u16.u32 half, %1; cvt.f32.f16 %0, half; }" : "=f"(number) : "r"(bits));
    return number;
}
DEVICE u32 to_half(float number) {
    u32 bits;
    asm("{ .reg .b16 half; cvt.rn.f16.f32 half, %1; cvt.u32.u16 %0, half; }" : "=r"(bits) : "f"(number));
    return bits;
}

struct Vector {
    u32 x, y, z, w;
};
// 16 bytes at a multiple of 16 that nobody writes, and that are read once.
DEVICE Vector load_vector(const void* address) {
    Vector v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}
// 16 bytes at a multiple of 16.
DEVICE void store_vector(void* address, Vector v) {
    *(uint4*)address = make_uint4(v.x, v.y, v.z, v.w);
}
// 16 bytes at a multiple of 16, of shared memory.
DEVICE Vector read_vector(const void* address) {
    uint4 v = *(const uint4*)address;
    return {v.x, v.y, v.z, v.w};
}
// What nobody writes while the kernel runs.
template <class T> DEVICE T load(const T* address) { return __ldg(address); }

#else
#include "host.h"
#endif

// n / divisor for n below 2^31: `factor` is ⌈2^(31 + shift) / divisor⌉, `shift` the number of bits of divisor − 1.
struct Divider {
    u32 divisor, factor, shift, unused;
    MEMBER u32 quotient(u32 n) const { return (u32)((u64)n * factor >> 31 >> shift); }
};
