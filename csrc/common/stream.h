// Writes that leave the caches alone, where the machine has them: memory is not read first to fill a line.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ds {

#if defined(__x86_64__)
__attribute__((target("avx2"))) inline int64_t stream_whole_lines_avx2(char* to, const char* from, int64_t nbytes) {
    int64_t i = 0;
    for (; i + 32 <= nbytes; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
    return i;
}

inline int64_t stream_whole_lines(char* to, const char* from, int64_t nbytes) {
    static const bool avx2 = __builtin_cpu_supports("avx2");
    if (avx2 && reinterpret_cast<uintptr_t>(to) % 32 == 0) return stream_whole_lines_avx2(to, from, nbytes);
    int64_t i = 0;
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
        for (; i + 16 <= nbytes; i += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
    return i;
}
#else
inline int64_t stream_whole_lines(char*, const char*, int64_t) { return 0; }
#endif

inline void stream_out(void* to, const void* from, int64_t nbytes) {
    char* const target = static_cast<char*>(to);
    const char* const source = static_cast<const char*>(from);
    const int64_t i = stream_whole_lines(target, source, nbytes);
    std::memcpy(target + i, source + i, nbytes - i);
}

// Before another thread may read what was written so.
inline void stream_end() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace ds
