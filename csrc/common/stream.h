// Writes that leave the caches alone, where the machine has them: memory is not read first to fill a line.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace ds {

inline void stream_out(void* to, const void* from, int64_t nbytes) {
    char* const target = static_cast<char*>(to);
    const char* const source = static_cast<const char*>(from);
    int64_t i = 0;
#if defined(__x86_64__)
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0)
        for (; i + 16 <= nbytes; i += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(target + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
#endif
    std::memcpy(target + i, source + i, nbytes - i);
}

// Before another thread may read what was written so.
inline void stream_end() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

}  // namespace ds
